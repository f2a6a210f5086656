"""Models whose layers keep a recurrent state in the native engine: each sequence has its own, wherever it is from."""

from __future__ import annotations

import inspect
import random
import sys
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.kernels import states as store
from posttrain.models import recurrent
from posttrain.models.embedded import byte_tokenizer
from posttrain.models.forward import forward_mode_of
from posttrain.models.loading import load_causal_lm
from posttrain.models.recurrent import recurrent_layers, state_bytes
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.engines import build_engine
from posttrain.rollout.generate import generate
from posttrain.rollout.native.build import build_native, split_cache
from posttrain.rollout.native.states import StatePool
from tests.rollout.test_native import plain_log_probs
from tests.rollout.test_tight_cache import SAMPLINGS, converse
from tests.rollout.tiny import tiny, write_tiny

MAIN = ["qwen3-next", "qwen3.5", "mamba2"]
PROMPTS = [[5, 6, 7, 8, 9], list(range(1, 40)), [5, 6, 7, 8, 9], [9], list(range(10, 75)), [5, 6, 7, 8, 9]]


@cache
def module(kind):
    return tiny(kind)


def native(kind, *, slots=None, blocks=None, segment=64, **settings):
    config = RolloutConfig(kv_cache_gb=0.02, **settings)
    engine, _ = build_native(module(kind), config, decode=lambda ids: "".join(chr(33 + one) for one in ids))
    engine.pool.states.limit = slots or engine.pool.states.limit
    engine.pool.limit = blocks or engine.pool.limit
    engine.queue.segment = segment
    return engine


def largest_gap(kind, prompts, outputs):
    plain = (plain_log_probs(module(kind), p, o.token_ids) for p, o in zip(prompts, outputs, strict=True))
    return max(
        float((torch.tensor(o.log_probs) - log_probs).abs().max()) for o, log_probs in zip(outputs, plain, strict=True)
    )


def sampled(kind, **settings):
    settings = {"max_num_batched_tokens": 48, **settings}  # prompts are computed in several pieces
    return generate(native(kind, **settings), PROMPTS, [Sampling(max_tokens=20)] * len(PROMPTS), range(len(PROMPTS)))


@pytest.mark.parametrize("kind", MAIN)
def test_groups_prompts_in_pieces_and_rows_that_start_later_have_the_log_probs_of_plain_transformers(kind):
    together, narrow = sampled(kind), sampled(kind, max_num_seqs=2)
    assert [output.token_ids for output in together] == [output.token_ids for output in narrow]
    assert len({tuple(together[row].token_ids) for row in (0, 2, 5)}) == 3, "responses to one prompt, with other seeds"
    assert largest_gap(kind, PROMPTS, together) < 1e-5
    assert largest_gap(kind, PROMPTS, narrow) < 1e-5


@pytest.mark.parametrize("kind", MAIN)
def test_in_half_precision_native_and_packed_sequences_pass_the_checks_at_loading(kind, tmp_path):
    tokenizer = byte_tokenizer()
    folder = write_tiny(kind, tmp_path)
    model = load_causal_lm(ModelConfig(path=str(folder)), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert forward_mode_of(model).packed
    _, name = build_engine(RolloutConfig(kv_cache_gb=0.02), model, tokenizer)
    assert name.startswith("native (general decoder") and ";" not in name


def test_a_prompt_is_computed_once_for_its_group():
    engine = native("qwen3-next")
    generate(engine, [[5] * 30] * 8, [Sampling(max_tokens=3)] * 8, range(8))
    assert engine.prompt_tokens == 30
    assert engine.pool.states.store.size == 8, "the last response continues with the prompt's own state"
    assert (engine.pool.states.busy, engine.pool.states.kept) == (0, 0)


def _conversation(kind):
    engine, ids = native(kind), [*PROMPTS[1]]
    for turn in range(3):
        parent = turn - 1 if turn else None
        engine.submit(Request(turn, list(ids), Sampling(max_tokens=9), turn, parent=parent, keep=True))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        if largest_gap(kind, [ids], outputs) > 1e-5:
            return "wrong"
        ids += [*outputs[0].token_ids, 3, 4, 5]
    return "right"


def _of_another_row(patch):
    patch.setattr(store.StateStore, "read", lambda self, key, slots: self.tensors[key][slots.flip(0)])


def _not_copied(patch):
    patch.setattr(store.StateStore, "copy", lambda self, source, target: None)


def _written_once(patch):
    write = store.StateStore.write

    def once(self, key, slots, values):
        if key not in self.tensors:
            write(self, key, slots, values)

    patch.setattr(store.StateStore, "write", once)


def _begins_anew(patch, kind):
    call = recurrent._call

    def forgetful(layer, hidden, states):
        if states is not None and hidden.shape[1] > 1:
            states.held = {name: value * (name[0] != kind) for name, value in states.held.items()}
        return call(layer, hidden, states)

    patch.setattr(recurrent, "_call", forgetful)


FAULTS = {
    "the state of another row": (_of_another_row, "group"),
    "not copied for the second response": (_not_copied, "group"),
    "not written back": (_written_once, "group"),
    "convolutions begin anew with a turn": (partial(_begins_anew, kind=recurrent.CONV), "turns"),
    "recurrences begin anew with a turn": (partial(_begins_anew, kind=recurrent.RECURRENT), "turns"),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_state_that_is_another_ones_or_is_forgotten_changes_log_probs(fault, monkeypatch):
    plant, where = FAULTS[fault] if fault else (lambda patch: None, None)
    plant(monkeypatch)
    if where in ("group", None):
        gap = largest_gap("qwen3-next", PROMPTS, sampled("qwen3-next"))
        assert gap > 1e-2 if fault else gap < 1e-5
    if where in ("turns", None):
        assert _conversation("qwen3-next") == ("wrong" if fault else "right")


@pytest.mark.parametrize("kind", ["qwen3-next", "mamba2"])
def test_a_turn_that_differs_before_its_end_is_computed_anew(kind):
    engine, prompt = native(kind), list(range(3, 30))
    (first,) = generate_kept(engine, Request("a", prompt, Sampling(max_tokens=8), 0, keep=True))
    said, before = [*prompt, *first.token_ids], engine.prompt_tokens
    other = [*said[:-3], 90, 91]
    (output,) = generate_kept(engine, Request("b", other, Sampling(max_tokens=8), 1, parent="a"))
    assert engine.prompt_tokens - before == len(other), "a state cannot be cut back"
    assert largest_gap(kind, [other], [output]) < 1e-5
    before = engine.prompt_tokens
    generate_kept(engine, Request("c", [*said, 7], Sampling(max_tokens=2), 1, parent="a"))
    assert engine.prompt_tokens - before == 2, "the kept state is still there for another continuation"


def generate_kept(engine, *requests):
    for request in requests:
        engine.submit(request)
    outputs = {}
    while engine.has_work():
        outputs |= {output.id: output for output in engine.step()}
    return [outputs[request.id] for request in requests]


@pytest.mark.parametrize("kind", ["qwen3-next", "mamba2"])
def test_several_turns_continue_from_one_state(kind):
    engine, prompt = native(kind, slots=4), list(range(3, 30))
    (first,) = generate_kept(engine, Request("a", prompt, Sampling(max_tokens=8), 0, keep=True))
    prompts, before = [[*prompt, *first.token_ids, 40 + n] for n in range(3)], engine.prompt_tokens
    outputs = generate_kept(
        engine, *[Request(n, ids, Sampling(max_tokens=8), n, parent="a") for n, ids in enumerate(prompts)]
    )
    assert engine.prompt_tokens - before == 3 * 2
    assert largest_gap(kind, prompts, outputs) < 1e-5


def cases():
    for seed in range(6):
        rng = random.Random(seed)
        blocks = rng.choice([6, 8, 12, 10_000])
        yield MAIN[seed % 3], seed, blocks, rng.choice([3, 4, 6]), rng.choice([8, 32]), rng.choice([2, 1024])


@pytest.mark.parametrize(
    ("kind", "seed", "blocks", "slots", "segment", "rows"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] >= 3)) for case in cases()],
)
def test_a_tight_cache_changes_no_token(kind, seed, blocks, slots, segment, rows):
    tight, given = native(kind, slots=slots, blocks=blocks, segment=segment, max_num_seqs=rows), SAMPLINGS[seed % 2]
    # Eight conversations, two thirds of those of models without states: here a step takes milliseconds.
    wanted = converse(native(kind, blocks=10_000), seed, given, in_rounds=seed % 2 == 0, groups=2)
    found = converse(tight, seed, given, in_rounds=seed % 2 == 0, groups=2)
    assert found.keys() == wanted.keys() and max(turn for _, _, turn in wanted) >= 1
    for id, output in wanted.items():
        assert found[id].token_ids == output.token_ids, id
        np.testing.assert_allclose(found[id].log_probs, output.log_probs, atol=1e-4)
    states = tight.pool.states
    assert tight.pool.used == 0 and states.busy == states.kept == 0 and len(states.free) == states.store.size <= slots


def test_new_weights_end_kept_states_and_running_rows_go_on_with_theirs():
    engine = native("qwen3-next")
    generate_kept(engine, Request("a", PROMPTS[1], Sampling(max_tokens=4), 0, keep=True))
    engine.submit(Request("b", PROMPTS[0], Sampling(max_tokens=9), 0))
    engine.step()
    engine.load_weights([], version=1)
    assert (engine.pool.states.busy, engine.pool.states.kept) == (1, 0)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[0].versions == [(0, 1), (1, 8)]
    assert largest_gap("qwen3-next", [PROMPTS[0]], outputs) < 1e-5  # these weights are the old ones


def test_sleep_frees_the_states(monkeypatch):
    monkeypatch.setattr("posttrain.rollout.native.pool.KEPT", 0)
    engine = native("mamba2")
    sampled_before = generate(engine, PROMPTS, [Sampling(max_tokens=4)] * 6, range(6))
    assert engine.cache_bytes() == 6 * state_bytes(module("mamba2")), "it has no keys and values"
    engine.sleep()
    assert engine.cache_bytes() == 0
    engine.wake()
    again = generate(engine, PROMPTS, [Sampling(max_tokens=4)] * 6, range(6))
    assert [output.token_ids for output in again] == [output.token_ids for output in sampled_before]


def test_an_abort_frees_the_states_of_rows_and_of_open_prompts():
    engine = native("qwen3-next", max_num_batched_tokens=32)
    for row, prompt in enumerate(PROMPTS):
        engine.submit(Request(row, prompt, Sampling(max_tokens=50), row))
    engine.step()
    assert engine.pool.states.busy > 0 and any(not prompt.ready for prompt in engine.queue.opened)
    engine.abort(range(6))
    assert engine.pool.states.busy == 0 and engine.pool.used == 0


def test_speculation_is_rejected_where_states_cannot_go_back():
    with pytest.raises(UserError, match=r"rollout.speculation=batch: layers of this model \(mamba2\) have recurrent"):
        native("mamba2", speculation="batch")
    engine, _ = build_native(tiny("qwen2"), RolloutConfig(speculation="batch"), decode=None)
    assert engine.speculation is not None


def test_the_cache_is_split_by_what_a_sequence_needs():
    assert split_cache(1000, 1, 0, 99, None) == (1000, 0)
    assert split_cache(10_000, 1, 100, 99, 800) == (8_000, 20)  # 100 for a state, 400 for half of its tokens
    assert split_cache(10_000, 1, 100, 6, 800) == (9_400, 6)
    assert split_cache(10_000, 0, 100, 999, 800) == (0, 100)
    with pytest.raises(UserError, match="kv_cache_gb: the recurrent states of a sequence have"):
        split_cache(700, 1, 100, 99, 800)


def test_slots_are_taken_kept_and_evicted_in_turn():
    pool = StatePool(torch.device("cpu"), limit=2, bytes_per_slot=8)
    first, second = pool.take(), pool.take()
    assert {first, second} == {0, 1} and not pool.fits(1)
    pool.keep(first)
    assert pool.fits(1)
    with pytest.raises(AssertionError, match="none is free"):
        pool.take()
    pool.evict = lambda: pool.drop(first)
    assert pool.take() == first


@pytest.mark.parametrize("kind", MAIN)
def test_state_bytes_are_those_of_the_tensors(kind):
    engine = native(kind)
    generate(engine, [[1, 2, 3]], [Sampling(max_tokens=2)], [0])
    states = engine.pool.states.store
    assert states.nbytes == states.size * state_bytes(module(kind)) > 0
    assert len({key[0] for key in states.tensors}) == len(recurrent_layers(module(kind)))


def test_sizes_are_found_by_torch_where_kernels_are_installed(monkeypatch):
    """They take no tensors of the meta device, on which sizes and memory plans are computed."""
    from transformers.integrations import hub_kernels
    from transformers.models.qwen3_5 import modeling_qwen3_5 as layers

    def chunk_gated_delta_rule(query, *given, **named):
        raise AssertionError(f"launched on {query.device}")

    monkeypatch.setitem(sys.modules, "a_kernel", SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    model, name = tiny("qwen3.5"), "torch_chunk_gated_delta_rule"
    expected = state_bytes(model)
    recurrent.answer_recurrence(model)
    by_torch = inspect.unwrap(getattr(layers, name))
    installed = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "a_kernel")(by_torch)
    monkeypatch.setattr(layers, name, installed)
    with pytest.raises(AssertionError, match="launched on cpu"):
        model(torch.tensor([[1, 2, 3]]))
    assert state_bytes(model) == expected
    logits = model.to("meta")(torch.tensor([[1, 2, 3]], device="meta")).logits
    assert logits.is_meta and not hub_kernels.is_torchdynamo_exporting()
