"""Captured decoding that runs ahead of the host: what comes out is what an engine without it gives, token by token.

On a CUDA device with graphs. Without one in Triton's interpreter, where each step is run as it is and a round's results
stay away until they are waited for, if Triton is installed: `TRITON_INTERPRET=1 pytest tests/rollout/test_ahead.py`.
"""

from __future__ import annotations

import weakref
from typing import ClassVar

import numpy as np
import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.kernels import cuda
from posttrain.kernels.decode import BLOCK
from posttrain.rollout.base import Output, Request, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native
from tests.rollout.tiny import MIXTURES, tiny

pytestmark = pytest.mark.gpu(interpreter=True)

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9], list(range(10, 43)), [11, 3]]
ROUND = 3  # steps of a round in which rows may end


def model(layers: int = 1, kind: str = "qwen2", **changed):
    """Few layers, as the interpreter takes its time."""
    module = tiny(kind, **changed)
    module.base_model.layers, module.config.num_hidden_layers = module.base_model.layers[:layers], layers
    return module.to(DEVICE)


def text(ids):
    return "".join(chr(id + 32) for id in ids)


def oracle(prompts, settings, seeds) -> list[Output]:
    return generate(HFEngine(model(), pad_token_id=0, decode=text), prompts, settings, seeds)


@pytest.fixture
def make(monkeypatch):
    """An engine whose rows go on in captured rounds; on a CPU its kernels are made to run there."""

    def build(module=None, *, exact=False, **settings):
        if not ON_CUDA:
            interpret(monkeypatch)
        config = RolloutConfig(kv_cache_gb=0.01, **settings)
        engine = build_native(module or model(), config, decode=text, exact=exact)[0]
        engine.rounds.tokens_per_step, engine.rounds.tokens_unseen = 256, ROUND
        return engine

    return build


def interpret(monkeypatch) -> None:
    from posttrain.kernels.cuda import async_rounds

    def cache(blocks, heads, size, dtype, device):
        if not heads:  # latents
            return (torch.zeros(blocks, BLOCK, size, dtype=dtype),)
        return tuple(torch.zeros(blocks, heads, BLOCK, size, dtype=dtype) for _ in range(2))

    monkeypatch.setattr(cuda, "runs_here", lambda tensor: tensor.dtype is torch.float32)
    monkeypatch.setattr("posttrain.rollout.native.pool.new_cache", cache)
    monkeypatch.setattr("posttrain.models.decoder.can_run_whole", lambda layer: False)
    monkeypatch.setattr(async_rounds, "_copy_to_host", Late.leave)
    monkeypatch.setattr(async_rounds, "record_event", lambda device: Late())


class Late:
    """Results that are nonsense until they are waited for."""

    on_the_way: ClassVar[list] = []

    def __init__(self) -> None:
        self.results, Late.on_the_way = Late.on_the_way, []

    @staticmethod
    def leave(tensor):
        wrong = torch.full(tensor.shape, -7, dtype=tensor.dtype)
        Late.on_the_way.append((wrong, tensor.clone()))
        return wrong

    def synchronize(self) -> None:
        for wrong, right in self.results:
            wrong.copy_(right)


def same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-4)


def rest_of(engine) -> dict:
    found = {}
    for _ in range(100):
        found |= {output.id: output for output in engine.step()}
        if (graphs := engine.decoder.graphs) is not None:  # who is not there stands still, and reads the first block
            nobody = torch.from_numpy(graphs.order.numbers < 0)
            assert graphs.rows.ended.cpu()[nobody].all() and not graphs.rows.table.cpu()[nobody].any()
        if not engine.has_work():
            break
    assert not engine.has_work() and engine.pool.used == 0 and not engine.late and not engine.rounds.first
    return found


def test_rows_of_different_lengths_with_stop_tokens(make):
    """One row ends with its first token, by a stop token, and one by its limit."""
    free = oracle(PROMPTS, [Sampling(max_tokens=9, greedy=row % 2 == 0) for row in range(6)], range(6))
    stops = [(90,), (free[1].token_ids[4], 90), (), (free[3].token_ids[0],), (1, 2, 3), ()]
    limits = (8, 9, 5, 9, 4, 1)
    settings = [
        Sampling(max_tokens=limit, greedy=row % 2 == 0, stop_token_ids=ids)
        for row, (limit, ids) in enumerate(zip(limits, stops, strict=True))
    ]
    theirs = oracle(PROMPTS, settings, range(6))
    assert [len(theirs[row].token_ids) for row in (3, 5)] == [1, 1] and theirs[1].finish_reason == "stop"
    engine = make()
    same(generate(engine, PROMPTS, settings, range(6)), theirs)
    assert engine.pool.used == 0
    assert engine.response_tokens == sum(len(output.token_ids) - 1 for output in theirs)


@pytest.mark.skipif(ON_CUDA, reason="there these products are for half precision: tests/rollout/test_native_cuda.py")
def test_products_with_what_follows_them_inside_give_the_same(make, monkeypatch):
    from posttrain.kernels.cuda import fused_products

    taken = []
    monkeypatch.setattr(fused_products, "takes", lambda x, weight, least: (taken.append(len(weight)), True)[1])
    settings = [Sampling(max_tokens=7, greedy=row % 2 == 0, temperature=1 + row / 5) for row in range(6)]
    same(generate(make(), PROMPTS, settings, range(6)), oracle(PROMPTS, settings, range(6)))
    assert set(taken) == {97, 128}, "the head's, and those of gate and up"


def test_the_next_round_is_begun_before_the_last_one_is_waited_for(make, monkeypatch):
    from posttrain.kernels.cuda import async_rounds, graphs

    engine, seen = make(), []
    launch, wait = graphs.GraphedSteps._launch, async_rounds.PendingResults.wait
    monkeypatch.setattr(graphs.GraphedSteps, "_launch", lambda *given: (seen.append("begin"), launch(*given))[1])
    monkeypatch.setattr(async_rounds.PendingResults, "wait", lambda flight: (seen.append("wait"), wait(flight))[1])
    settings = [Sampling(max_tokens=2 * ROUND + 3, stop_token_ids=(97,))]
    generate(engine, PROMPTS[:1], settings, [0])
    assert seen == ["begin", "begin", "wait", "begin", "wait", "wait"]


def test_the_engine_says_how_long_the_device_is_busy_with_the_round_that_was_begun(make, monkeypatch):
    from posttrain.kernels.cuda import async_rounds

    monkeypatch.setattr(async_rounds.PendingResults, "step_s", 100.0)
    engine, seen = make(), []
    engine.submit(Request(0, PROMPTS[0], Sampling(max_tokens=2 * ROUND + 3, stop_token_ids=(97,)), 0))
    while engine.has_work():
        engine.step()
        seen.append(engine.ahead_s())
    assert 0.7 * 100 * ROUND < max(seen) < 0.8 * 100 * ROUND
    assert seen[-1] <= 0  # all is read, and nothing was begun


def test_when_rows_end_only_a_short_round_of_theirs_is_left_to_read(make, monkeypatch):
    engine, steps, unread = make(), [], []
    decode, outputs = engine.decoder.decode, engine.slots.outputs

    def begin(rows, *given):
        steps.append(rows.steps)
        return decode(rows, *given)

    def end(ended, version):
        unread.extend(engine.slots.count[slot] - len(engine.slots.lists[slot]) for slot in ended)
        return outputs(ended, version)

    monkeypatch.setattr(engine.decoder, "decode", begin)
    monkeypatch.setattr(engine.slots, "outputs", end)
    settings = [Sampling(max_tokens=4 * ROUND)] * 2
    same(generate(engine, PROMPTS[:2], settings, range(2)), oracle(PROMPTS[:2], settings, range(2)))
    assert (steps, unread) == ([3 * ROUND - 1, ROUND, 0], [ROUND, ROUND])


def test_rows_that_leave_are_replaced_while_the_others_go_on(make):
    """Three slots for seven requests, some of the same prompt; one is let in where another ended unseen."""
    prompts = [PROMPTS[at] for at in (0, 1, 0, 3, 1, 5, 0)]
    settings = [Sampling(max_tokens=n, temperature=0.8, stop_token_ids=(40,)) for n in (2, 8, 5, 1, 4, 3, 4)]
    theirs = oracle(prompts, settings, range(7))
    engine = make(max_num_seqs=3)
    same(generate(engine, prompts, settings, range(7)), theirs)
    assert engine.prompt_tokens == sum(map(len, (PROMPTS[at] for at in (0, 1, 3, 5))))
    assert engine.pool.used == 0


def test_an_aborted_row_leaves_its_slot_to_another_and_the_others_alone(make):
    settings = [Sampling(max_tokens=10, stop_token_ids=(97,))] * 4
    theirs = oracle(PROMPTS[:4], settings, range(4))
    engine = make(max_num_seqs=3)
    for row in range(3):
        engine.submit(Request(row, PROMPTS[row], settings[row], row))
    while not engine.slots.count[engine.slots.active].sum():
        assert engine.step() == []
    (gone,) = engine.abort([1])
    assert gone.finish_reason == "abort" and gone.token_ids == theirs[1].token_ids[: len(gone.token_ids)] != []
    engine.submit(Request(3, PROMPTS[3], settings[3], 3))  # takes the slot in which another is under way
    same(list(rest_of(engine).values()), [theirs[row] for row in (0, 2, 3)])


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_tokens_under_way_belong_to_the_weights_that_made_them(make, rounds):
    """The new weights say 0 whatever was said before, which the old ones never do. A row of four tokens may be over."""
    prompts = [PROMPTS[3], PROMPTS[5]]
    settings = [Sampling(max_tokens=n, greedy=True, stop_token_ids=(96,)) for n in (12, 4)]
    before = oracle(prompts, settings, range(2))
    assert 0 not in [token for output in before for token in output.token_ids]
    engine, found = make(), {}
    for row in range(2):
        engine.submit(Request(row, prompts[row], settings[row], row))
    for _ in range(1 + rounds):
        found |= {output.id: output for output in engine.step()}
    engine.load_weights([("model.norm.weight", torch.zeros(32))], version=1)
    found |= rest_of(engine)
    for row, limit in enumerate((12, 4)):
        made = min(limit, 1 + rounds * ROUND)
        assert found[row].versions == [(0, made), (1, limit - made)][: 2 if made < limit else 1]
        assert found[row].token_ids == before[row].token_ids[:made] + [0] * (limit - made)


def test_rows_that_must_be_looked_at_join_and_leave_plain_ones(make):
    """A stop string, and a filter: while they run all go step by step, and rows under way are known first."""
    plain = Sampling(max_tokens=14, stop_token_ids=(97,))
    free = oracle(PROMPTS[:1], [plain], [0])[0]
    settings = [plain, Sampling(max_tokens=9, stop=(text(free.token_ids[2:4]),)), Sampling(max_tokens=3, top_p=0.9)]
    prompts, seeds = [PROMPTS[1], PROMPTS[0], PROMPTS[3]], [4, 0, 6]
    theirs = oracle(prompts, settings, seeds)
    assert theirs[1].finish_reason == "stop"
    engine = make()
    engine.submit(Request(0, prompts[0], plain, seeds[0]))
    for _ in range(3):
        engine.step()
    assert engine.slots.under_way[engine.slots.active].any()
    for row in (1, 2):
        engine.submit(Request(row, prompts[row], settings[row], seeds[row]))
    found = rest_of(engine)
    same([found[row] for row in range(3)], theirs)


def test_rows_become_many_and_few_again(make):
    """Graphs of 8, 24, 16 and 8 rows; the many have longer prompts, for which all room is made anew."""
    prompts = [[7, row] for row in range(3)] + [[*range(40), row] for row in range(15)]
    limits = [20] * 2 + [9] + [3] * 7 + [8] * 8
    settings = [Sampling(max_tokens=limit, greedy=limit == 8, stop_token_ids=(97,)) for limit in limits]
    theirs = oracle(prompts, settings, range(18))
    engine = make()
    for row in range(3):
        engine.submit(Request(row, prompts[row], settings[row], row))
    for _ in range(3):
        engine.step()
    for row in range(3, 18):
        engine.submit(Request(row, prompts[row], settings[row], row))
    found = rest_of(engine)
    same([found[row] for row in range(18)], theirs)
    assert {size for size, _, _ in engine.decoder.graphs.replays} == {24, 16, 8}


def test_a_sleeping_engine_holds_no_cache_and_goes_on_with_another(make, monkeypatch):
    """Also where one layer's alone has moved."""
    monkeypatch.setattr("posttrain.rollout.native.pool.kept_bytes", lambda device: 0)
    engine, settings = make(module=model(layers=2)), [Sampling(max_tokens=4, stop_token_ids=(97,))]
    first = generate(engine, PROMPTS[:1], settings, [0])
    held = [weakref.ref(part) for cache in engine.pool.layers.values() for part in cache]
    engine.sleep()
    assert len(held) == 4 and all(part() is None for part in held)
    engine.wake("weights"), engine.wake("cache")
    same(generate(engine, PROMPTS[:1], settings, [0]), first)
    before, engine.pool.layers[1] = engine.decoder.graphs.addresses, tuple(map(torch.clone, engine.pool.layers[1]))
    same(generate(engine, PROMPTS[:1], settings, [0]), first)
    assert engine.decoder.graphs.addresses != before, "captured steps would go on with the memory that was there"


@pytest.mark.skipif(not ON_CUDA, reason="in the interpreter the host computes")
def test_letting_rows_in_waits_for_nothing(make):
    engine = make(max_num_seqs=3)
    settings = [Sampling(max_tokens=n, stop_token_ids=(97,)) for n in (2, 8, 5, 3, 4, 9)]
    first = generate(engine, PROMPTS, settings, range(6))
    torch.cuda.set_sync_debug_mode("error")  # of torch's own operations; a round is waited for by its event
    try:
        again = generate(engine, PROMPTS, settings, range(6))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [output.token_ids for output in again] == [output.token_ids for output in first]


def chosen_by_transformers(module, ids):
    """(tokens, layers, top_k) the experts of all tokens but the last, by the model's own routers."""
    found = []
    routers = [layer.mlp.gate for layer in module.base_model.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: found.append(out[2].cpu())) for router in routers]
    with torch.no_grad():
        module(torch.tensor([ids[:-1]], device=DEVICE))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).numpy()


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_mixtures_of_experts_decode_in_captured_steps_as_they_do_without_them(kind, make):
    """Every step chooses other experts, and the graph is the same."""
    prompts = PROMPTS if ON_CUDA else [[5, 6, 7], [9]]
    settings = [Sampling(max_tokens=3 + row, greedy=row % 2 == 0) for row in range(len(prompts))]
    module = model(2, kind)  # with one layer only the tokens that are sampled from would go through the experts
    engine = make(module, enable_rollout_routing_replay=True)
    captured = generate(engine, prompts, settings, range(len(prompts)))
    assert engine.decoder.graphs.replays
    same(captured, generate(HFEngine(module, pad_token_id=0, decode=text), prompts, settings, range(len(prompts))))
    for prompt, output in zip(prompts, captured, strict=True):
        assert output.routes is not None
        assert (np.sort(output.routes) == np.sort(chosen_by_transformers(module, [*prompt, *output.token_ids]))).all()
    if ON_CUDA:  # the interpreter takes its time
        plain = make(module)
        plain.rounds.tokens_per_step, plain.rounds.tokens_unseen = 1, None
        same(captured, generate(plain, prompts, settings, range(len(prompts))))
        assert plain.decoder.graphs is None


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_exact_decoding_samples_what_the_oracle_samples_and_scores_as_it_decodes(kind, make, monkeypatch):
    """With the attention, norms and rotation of training; on a CUDA device in bfloat16, bit for bit."""
    from posttrain.kernels import train

    monkeypatch.setattr("posttrain.rollout.native.build.check_exact", lambda *_: None)  # nobody proved the model
    if ON_CUDA:  # of widths and a vocabulary that exactness is built for
        module = model(kind=kind, hidden_size=128, intermediate_size=256, head_dim=64, vocab_size=96).bfloat16()
    else:
        module = model(kind=kind)
        monkeypatch.setattr(train, "on_cuda", lambda tensor: True)
    settings = [Sampling(max_tokens=2 + row, temperature=0.7) for row in range(len(PROMPTS))]
    engine = make(module, exact=True)
    outputs = generate(engine, PROMPTS, settings, range(6))
    scores = engine.score([[*p, *o.token_ids] for p, o in zip(PROMPTS, outputs, strict=True)], temperature=0.7)
    for prompt, output, score in zip(PROMPTS, outputs, scores, strict=True):
        assert torch.equal(torch.tensor(output.log_probs), score[len(prompt) - 1 :]) or not ON_CUDA
        torch.testing.assert_close(torch.tensor(output.log_probs), score[len(prompt) - 1 :], rtol=0, atol=1e-4)
    if not ON_CUDA:
        theirs = generate(HFEngine(model(kind=kind), pad_token_id=0, decode=text), PROMPTS, settings, range(6))
        assert [output.token_ids for output in outputs] == [output.token_ids for output in theirs]


@pytest.mark.parametrize("wrong", [False, True])
def test_drafted_tokens_are_verified_as_rows_of_one_captured_step(wrong, make, monkeypatch):
    """Drafts are the tokens that are sampled, or differ from them at every third place."""
    settings = [
        Sampling(max_tokens=9 + row, greedy=row % 2 == 0, stop_token_ids=(90,) if row == 1 else ()) for row in range(6)
    ]
    theirs = oracle(PROMPTS, settings, range(6))
    engine = make(speculation="batch")
    speculation = engine.speculation
    assert speculation is not None
    monkeypatch.setattr(type(speculation), "width", lambda self, slots, rows: 4)

    def drafts(self, slots, rows, width):
        found = []
        for slot in rows.tolist():
            count, most = int(slots.count[slot]), min(width, int(slots.limit[slot] - slots.count[slot])) - 1
            left = theirs[slots.requests[slot].id].token_ids[count : count + most]
            found.append([(token + (wrong and place % 3 == 2)) % 97 for place, token in enumerate(left)])
        return found

    monkeypatch.setattr(type(speculation), "drafts", drafts)
    same(generate(engine, PROMPTS, settings, range(6)), theirs)
    assert {kind[2] for kind in engine.decoder.graphs.replays} == {True}
    counts = speculation.take_counts()
    assert counts["accepted"] == counts["drafted"] if not wrong else 0 < counts["accepted"] < counts["drafted"]
    assert engine.pool.used == 0
