"""The native engine against plain transformers, kind by kind, and its own promises."""

from functools import cache

import numpy as np
import pytest
import torch

from posttrain.config.model import ModelConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.kernels import compiled
from posttrain.kernels.decode import BLOCK
from posttrain.models import decoder
from posttrain.models.decodable import can_decode_fast
from posttrain.models.lora import add_adapters
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import generate
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native, bytes_per_token, check_can_cut
from posttrain.rollout.native.engine import MANY
from tests.machine import has_compiler, multiplies
from tests.rollout.tiny import FAST, KINDS, MIXTURES, VOCABULARY, tiny

PROMPTS = [[5, 6, 7], list(range(40)), [5, 6, 7], [9], list(range(10, 75)), list(range(32))]


def native(module, **settings):
    return build_native(module, RolloutConfig(kv_cache_gb=0.05, **settings), decode=None)[0]


def plain_log_p(model, prompt, response, temperature=1.0):
    """Of all tokens at each place of the response."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature, -1)


def plain_log_probs(model, prompt, response, temperature=1.0):
    token_ids = torch.tensor(response, dtype=torch.long)
    return plain_log_p(model, prompt, response, temperature).gather(1, token_ids[:, None]).squeeze(1)


@pytest.fixture(params=["compiled", "torch"])
def kernels(request, monkeypatch):
    """Both ways of computing: the compiled kernels and their torch twins."""
    if request.param == "torch":
        monkeypatch.setattr(compiled, "_functions", lambda: None)
    elif not has_compiler():
        pytest.skip("no C++ compiler on this machine")
    else:
        assert compiled.why_not() is None
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers_and_log_probs_within_1e_5(kernels, kind):
    module = tiny(kind)
    assert can_decode_fast(module) == (kind in FAST)
    oracle = tiny(kind, attention="eager")
    outputs = generate(native(module), PROMPTS, [Sampling(max_tokens=40, greedy=True)] * 6, [0] * 6)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        # Each token is the likeliest after those before it: in one pass, what generating token by token would show.
        log_probs, likeliest = plain_log_p(oracle, prompt, output.token_ids).max(-1)
        assert len(output.token_ids) == 40 and output.token_ids == likeliest.tolist()
        torch.testing.assert_close(torch.tensor(output.log_probs), log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gemma3", "gpt2"])
def test_score_equals_transformers(kernels, kind):
    oracle = tiny(kind, attention="eager")
    for row, scored in zip(PROMPTS, native(tiny(kind)).score(PROMPTS, temperature=0.7), strict=True):
        expected = plain_log_probs(oracle, row[:1], row[1:], 0.7)
        torch.testing.assert_close(scored, expected, rtol=0, atol=1e-5)


def test_sampled_frequencies_pass_a_chi_squared_test(kernels):
    """3,000 seeds of one prompt: the first token, and the second after the most frequent first one."""
    module = tiny("qwen2")
    settings = [Sampling(max_tokens=2, temperature=1.3)] * 3000
    outputs = generate(native(module), [[5, 6, 7]] * 3000, settings, range(3000))
    first = np.array([output.token_ids[0] for output in outputs])
    favourite = int(np.bincount(first).argmax())
    second = np.array([output.token_ids[1] for output in outputs if output.token_ids[0] == favourite])
    for drawn, prompt in ((first, [5, 6, 7]), (second, [5, 6, 7, favourite])):
        with torch.no_grad():
            p = torch.softmax(module(torch.tensor([prompt])).logits[0, -1] / 1.3, -1).double().numpy()
        counts, expected = np.bincount(drawn, minlength=VOCABULARY), p * len(drawn)
        rare = expected < 5  # too few for the statistic: one class of their own
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        freedom = len(counts) - 1
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert freedom >= 3 and statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_samples_are_the_oracles_for_the_same_seeds(kernels):
    """Both engines draw by the same numbers, so that (float rounding apart) they draw the same tokens."""
    settings = [Sampling(max_tokens=20, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01), Sampling(max_tokens=20)] * 3
    ours = generate(native(tiny("llama")), PROMPTS, settings, range(6))
    theirs = generate(HFEngine(tiny("llama"), pad_token_id=0), PROMPTS, settings, range(6))
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]


def test_equal_prompts_are_computed_once(kernels):
    engine = native(tiny("qwen2"))
    generate(engine, [list(range(50))] * 8 + [[1, 2]], [Sampling(max_tokens=5)] * 9, range(9))
    assert engine.prompt_tokens == 52 and engine.response_tokens == 9 * 4


OF_ALL_LENGTHS = [Sampling(max_tokens=n) for n in (30, 3, 40, 11, 25, 33)]


@cache  # by the kernels that are open: their log-probs differ in the last bits
def made_with_room(kernels):
    return [o.token_ids for o in generate(native(tiny("qwen3")), PROMPTS, OF_ALL_LENGTHS, range(6))]


@pytest.mark.parametrize(
    "settings", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 33}, {"kv_cache_gb": 150 / 2**20}]
)
def test_slots_budget_and_a_small_cache_change_no_sample(kernels, settings):
    """Two slots; prompts in pieces of a few tokens; a cache of 150 KiB, six blocks: about two rows at a time."""
    engine = build_native(tiny("qwen3"), RolloutConfig(**{"kv_cache_gb": 0.05, **settings}), decode=None)[0]
    narrow = generate(engine, PROMPTS, OF_ALL_LENGTHS, range(6))
    assert [o.token_ids for o in narrow] == made_with_room(kernels)
    assert engine.pool.used == 0 and not engine.queue.prompts and not engine.queue.opened


def test_a_finished_row_is_replaced_at_once():
    engine = native(tiny("qwen2"), max_num_seqs=2)
    for row, limit in enumerate((1, 6, 2, 2, 2)):
        engine.submit(Request(row, [row + 1], Sampling(max_tokens=limit), row))
    busy = []
    while engine.has_work():
        before = engine.response_tokens + engine.prompt_tokens
        engine.step()
        busy.append(engine.response_tokens + engine.prompt_tokens - before)
    assert busy == [2, 2, 2, 2, 2, 2, 1][: len(busy)] and len(busy) <= 7


def test_an_engine_whose_decoder_runs_ahead_says_how_long_others_may_still_come():
    """Most of the time of the round that its device is at: the rest is for the host, which begins the next one."""
    engine = native(tiny("qwen2"))
    engine.rounds.tokens_per_step, busy_s = 64, [1000.0]

    def decode(rows, caches, routes_PLK):
        rows.tokens, rows.log_probs = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32)
        rows.counts, rows.busy_s = rows.counts + 1, busy_s[0]
        return True

    engine.decoder.decode = decode
    engine.submit(Request(0, [5, 6, 7], Sampling(max_tokens=40), 0))
    assert engine.ahead_s() <= 0
    engine.step()
    engine.step()
    assert 700 < engine.ahead_s() < 800
    busy_s[0] = 0.0
    engine.step()
    assert engine.ahead_s() <= 0


def test_rows_that_wait_for_prompts_wait_for_all_that_there_is_room_for():
    """Where a step of many tokens is captured, prompts are computed while rows wait: none goes ahead of the others."""
    engine = native(tiny("qwen2"), max_num_batched_tokens=32)
    engine.rounds.tokens_per_step, engine.rounds.tokens_unseen = 64, 16
    rows_of_first_call = []

    def decode(rows, caches, routes_PLK):
        rows_of_first_call.append(len(rows.last))
        engine.rounds.tokens_per_step, engine.rounds.tokens_unseen = 1, None  # goes on token by token, on any processor
        return False

    engine.decoder.decode = decode
    prompts = [[number, *range(20)] for number in range(5)]
    outputs = generate(engine, prompts, [Sampling(max_tokens=40)] * 5, range(5))
    assert rows_of_first_call == [5]
    plain = generate(native(tiny("qwen2")), prompts, [Sampling(max_tokens=40)] * 5, range(5))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_a_request_that_can_never_fit_is_refused_with_the_setting_to_change():
    engine = build_native(tiny("qwen2"), RolloutConfig(kv_cache_gb=64 / 2**20), decode=None)[0]
    with pytest.raises(UserError, match=r"kv_cache_gb"):
        engine.submit(Request(0, [1, 2, 3], Sampling(max_tokens=5000), 0))


def test_new_weights_in_the_middle_give_version_spans_and_new_prompts(kernels):
    """Running rows go on with their cache; a waiting request's prompt is computed with the new weights."""
    module = tiny("qwen2")
    engine = native(module, max_num_seqs=2)
    for row in range(3):
        engine.submit(Request(row, [5, 6, 7], Sampling(max_tokens=6), row))
    engine.step(), engine.step()
    other = tiny("qwen2", seed=1)
    engine.load_weights(other.state_dict().items(), version=3)
    outputs = {}
    while engine.has_work():
        outputs |= {output.id: output for output in engine.step()}
    assert [outputs[row].versions for row in range(3)] == [[(0, 2), (3, 4)], [(0, 2), (3, 4)], [(3, 6)]]
    expected = plain_log_probs(tiny("qwen2", seed=1, attention="eager"), [5, 6, 7], outputs[2].token_ids)
    torch.testing.assert_close(torch.tensor(outputs[2].log_probs), expected, rtol=0, atol=1e-5)
    assert engine.pool.used == 0


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-tied", "qwen3", *sorted(MIXTURES)])
def test_the_trainers_parameters_are_views_into_the_engines_weights(kind):
    """An optimizer step is seen without a copy, and training through the views gives the gradients of the module."""
    module, untouched = tiny(kind), tiny(kind)
    engine = native(module)
    qkv = engine.decoder.arena.layers[0]["qkv"].weight
    assert (
        module.model.layers[0].self_attn.k_proj.weight.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    )
    assert engine.shares_weights
    for model in (module, untouched):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.tensor([PROMPTS[1]]), labels=torch.tensor([PROMPTS[1]])).loss.backward()
        optimizer.step()
    for (name, ours), theirs in zip(module.named_parameters(), untouched.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    engine.load_weights((), version=1)
    expected = plain_log_probs(untouched, [3], PROMPTS[4])
    torch.testing.assert_close(engine.score([[3, *PROMPTS[4]]])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-moe"])
def test_weights_that_were_moved_are_fused_anew(kind):
    """What offloading does: every parameter gets other memory."""
    module = tiny(kind)
    engine = native(module)
    before = engine.score([PROMPTS[1]])[0]
    for parameter in module.parameters():
        parameter.data = parameter.data.clone() * 1.1
    expected = plain_log_probs(module, PROMPTS[1][:1], PROMPTS[1][1:])
    torch.testing.assert_close(engine.score([PROMPTS[1]])[0], expected, rtol=0, atol=1e-5)
    assert not torch.allclose(before, expected)
    assert not engine.decoder.arena.is_outdated()


@pytest.mark.parametrize("kind", ["llama", *sorted(MIXTURES)])
def test_private_weights_leave_the_trainers_alone(kind):
    module = tiny(kind)
    engine = build_native(module, RolloutConfig(kv_cache_gb=0.05), decode=None, share=False)[0]
    before = engine.score([PROMPTS[1]])[0]
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.1)
    assert torch.equal(engine.score([PROMPTS[1]])[0], before) and not engine.shares_weights
    engine.load_weights(module.state_dict().items(), version=1)
    expected = plain_log_probs(module, PROMPTS[1][:1], PROMPTS[1][1:])
    torch.testing.assert_close(engine.score([PROMPTS[1]])[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "qwen3-moe-mixed", "qwen2-moe"])
def test_adapters_are_applied_beside_a_base_that_never_changes(kernels, kind):
    targets = ["c_attn", "c_proj"] if kind == "gpt2" else "all-linear"
    module = add_adapters(tiny(kind), ModelConfig(path="x", lora_rank=3, target_modules=targets))
    base = {name: weight.clone() for name, weight in module.named_parameters() if "lora_" not in name}
    engine = native(module)
    for sync in range(3):
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if "lora_" in name:
                    weight.normal_(0, 0.1)
        engine.load_weights((), version=sync)
        output = generate(engine, [PROMPTS[1]], [Sampling(max_tokens=9)], [sync])[0]
        expected = plain_log_probs(module, PROMPTS[1], output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)
    for name, weight in module.named_parameters():
        assert "lora_" in name or torch.equal(weight, base[name]), name


def test_bfloat16_log_probs_stay_close_to_transformers(kernels):
    oracle = tiny("qwen3", torch.bfloat16, attention="eager")
    for output, prompt in zip(
        generate(native(tiny("qwen3", torch.bfloat16)), PROMPTS, [Sampling(max_tokens=30)] * 6, range(6)),
        PROMPTS,
        strict=True,
    ):
        gap = (torch.tensor(output.log_probs) - plain_log_probs(oracle, prompt, output.token_ids)).abs()
        assert gap.mean() < 0.03 and gap.max() < 0.3


@pytest.mark.parametrize("dtype, within", [(torch.float32, 1e-5), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("kind", sorted(FAST - MIXTURES))
def test_the_whole_step_equals_transformers_and_follows_new_weights(kind, dtype, within):
    """Long responses go through all layers in one call, over packed copies of the weights; new weights replace them."""
    module = tiny(kind, dtype)
    engine = native(module)
    engine.decoder.make_fast_copies()
    if not multiplies(str(dtype).removeprefix("torch.")):
        pytest.skip("this processor has not the instructions that the whole step is written for")
    assert engine.decoder.whole is not None
    oracle = tiny(kind, dtype, attention="eager")
    for output, prompt in zip(generate(engine, PROMPTS, [Sampling(max_tokens=40)] * 6, range(6)), PROMPTS, strict=True):
        expected = plain_log_probs(oracle, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=within)
    other = tiny(kind, dtype, seed=1)
    engine.load_weights(other.state_dict().items(), version=1)
    assert engine.decoder.whole is None
    engine.decoder.make_fast_copies()
    scored = engine.score([PROMPTS[4]])[0]
    torch.testing.assert_close(scored, plain_log_probs(other, PROMPTS[4][:1], PROMPTS[4][1:]), rtol=0, atol=within)


def test_long_or_many_responses_have_the_weights_copied_and_few_short_ones_do_not():
    engine = native(tiny("qwen2"))
    generate(engine, PROMPTS, [Sampling(max_tokens=MANY - 1)] * 6, range(6))
    assert engine.decoder.whole is None
    for prompts, tokens in (PROMPTS, MANY), (PROMPTS * 100, 2):
        generate(engine, prompts, [Sampling(max_tokens=tokens)] * len(prompts), range(len(prompts)))
        assert (engine.decoder.whole is not None) == multiplies("float32")
        engine.sleep()
        assert engine.decoder.whole is None
        engine.wake()


def test_new_weights_in_flight_give_the_same_steps_whether_a_step_or_the_probe_comes_first():
    """Replays count steps. A clock decides whether rows are decoded between new weights and their probe."""

    def rest(before_probe: int) -> list[list[list[int]]]:
        engine = native(tiny("qwen2"))
        for number, prompt in enumerate(PROMPTS):
            engine.submit(Request(number, prompt, Sampling(max_tokens=MANY + 4 * number), number))
        engine.step()
        engine.load_weights(tiny("qwen2", seed=1).state_dict().items(), version=1)
        made = [engine.step() for _ in range(before_probe)]
        engine.score([[1, 2, 3]])
        while engine.has_work():
            made.append(engine.step())
        return [[output.token_ids for output in ended] for ended in made]

    assert rest(0) == rest(1) != []


def test_scores_are_computed_without_copied_weights_which_round_otherwise(monkeypatch):
    """They are metrics of a run (`sync/probe_max`). A clock may decide whether there are copies at a weight sync."""
    engine = native(tiny("qwen2"))
    plain = engine.score(PROMPTS)
    engine.decoder.make_fast_copies()
    if not multiplies("float32"):
        pytest.skip("this processor has not the instructions that the whole step is written for")
    copies = engine.decoder.whole
    monkeypatch.setattr(copies, "run", None)
    assert all(torch.equal(one, other) for one, other in zip(plain, engine.score(PROMPTS), strict=True))
    assert engine.decoder.whole is copies is not None  # it is there for the next step


def test_an_engine_that_slept_makes_the_steps_of_a_new_one():
    """Replays count steps. A run that is resumed has a new engine where the recorded one had only slept."""

    def steps(engine) -> list[int]:
        engine.score([[1, 2, 3]])  # as after a weight sync
        for number, prompt in enumerate(PROMPTS):
            engine.submit(Request(number, prompt, Sampling(max_tokens=5), number))
        ended = []
        while engine.has_work():
            ended.append(len(engine.step()))
        return [*ended, engine.decoder.whole is not None]

    used = native(tiny("qwen2"))
    generate(used, PROMPTS, [Sampling(max_tokens=MANY)] * 6, range(6))
    used.sleep()
    used.wake()
    assert steps(used) == steps(native(tiny("qwen2")))


def test_weights_packed_for_onednn_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(decoder, "can_run_whole", lambda weights: False)
    engine = native(tiny("qwen2", torch.bfloat16))
    packed = generate(engine, PROMPTS, [Sampling(max_tokens=40)] * 6, range(6))
    if engine.decoder.layers[0].qkv.packed is None:
        pytest.skip("torch without oneDNN")
    engine.sleep()
    engine.wake()
    plain = generate(engine, PROMPTS, [Sampling(max_tokens=12)] * 6, range(6))
    for one, other in zip(packed, plain, strict=True):
        assert one.token_ids[:12] == other.token_ids and list(one.log_probs[:12]) == list(other.log_probs)


def test_float64_models_are_decoded_in_float64():
    module = tiny("qwen2", torch.float64)
    output = generate(native(module), [PROMPTS[1]], [Sampling(max_tokens=9)], [0])[0]
    ids = torch.tensor([[*PROMPTS[1], *output.token_ids]])
    log_p = torch.log_softmax(module(ids).logits[0], -1)[len(PROMPTS[1]) - 1 : -1]
    expected = log_p.gather(1, ids[0, len(PROMPTS[1]) :, None]).squeeze(1).float()
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-7)


def test_sleep_gives_back_and_the_next_request_takes_again():
    engine = native(tiny("qwen2"))
    engine.submit(Request(0, [1, 2], Sampling(max_tokens=4), 0))
    engine.step()
    with pytest.raises(RuntimeError, match="abort them"):
        engine.sleep()
    engine.abort([0])
    engine.sleep()
    engine.wake()
    assert len(generate(engine, [[1, 2]], [Sampling(max_tokens=4)], [0])[0].token_ids) == 4


def different_tokens(prompts, outputs):
    """How many tokens must be computed if rows that are the same so far are computed as one; the last is not fed."""
    beginnings = [
        (tuple(p), o.token_ids[:n]) for p, o in zip(prompts, outputs, strict=True) for n in range(1, len(o.token_ids))
    ]
    return len({(prompt, tuple(ids)) for prompt, ids in beginnings})


@pytest.mark.parametrize("slots", [64, 3])
def test_several_tokens_in_one_step_change_no_sample(slots):
    """Ragged limits, stop tokens, own temperatures, greedy rows among sampled ones, and rows that wait for a slot."""
    if not multiplies("float32"):
        pytest.skip("this processor has not the instructions that the whole step is written for")
    samplings = [
        Sampling(max_tokens=16 + 9 * row, temperature=0.5 + 0.3 * row, greedy=row == 2, stop_token_ids=stops)
        for row, stops in enumerate([(), (7, 3), (), (1, 2, 3), (), (50,)])
    ]
    found = {}
    for tokens in (1, 64):
        engine = native(tiny("qwen2"), max_num_seqs=slots)
        engine.rounds.tokens_per_step, steps = tokens, 0
        outputs = []
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True)):
            engine.submit(Request(row, prompt, sampling, seed=100 + row))
        while engine.has_work():
            outputs += engine.step()
            steps += 1
        found[tokens] = sorted(outputs, key=lambda output: output.id), steps, engine.response_tokens
    (single, steps, made), (several, fewer, made_together) = found[1], found[64]
    assert fewer < steps / 3 and made == sum(len(output.token_ids) - 1 for output in single)
    distinct = different_tokens(PROMPTS, single)
    assert made_together == distinct if slots == 64 else distinct <= made_together <= made
    for a, b in zip(single, several, strict=True):
        assert (a.token_ids, a.finish_reason, a.versions) == (b.token_ids, b.finish_reason, b.versions)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=0, atol=1e-5)
    assert {output.finish_reason for output in several} == {"stop", "length"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [64, 5])
def test_rows_that_made_the_same_tokens_are_computed_as_one(dtype, slots):
    """Rows that never part, rows that part early, others that wait for a slot: each gets what it gets alone."""
    if not multiplies(str(dtype).removeprefix("torch.")):
        pytest.skip("this processor has not the instructions that the whole step is written for")
    prompts = [PROMPTS[row % 2] for row in range(16)]
    samplings = [
        Sampling(max_tokens=20 + row, temperature=0.2 + 0.1 * row, greedy=row % 4 < 2, stop_token_ids=(3,))
        for row in range(16)
    ]
    computed, outputs = {}, {}
    for tokens in (1, 64):
        engine = native(tiny("qwen2", dtype), max_num_seqs=slots)
        engine.rounds.tokens_per_step = tokens
        outputs[tokens] = generate(engine, prompts, samplings, range(16))
        computed[tokens] = engine.response_tokens
    for one, other in zip(outputs[1], outputs[64], strict=True):
        assert one.token_ids == other.token_ids and one.finish_reason == other.finish_reason
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
    distinct = different_tokens(prompts, outputs[1])
    assert computed[1] == sum(len(output.token_ids) - 1 for output in outputs[1]) > 1.4 * distinct
    assert computed[64] == distinct if slots == 64 else distinct <= computed[64] < computed[1]
    assert len({tuple(output.token_ids) for output in outputs[64]}) > 8


def test_the_cache_of_latent_attention_is_counted_as_it_is_filled():
    from types import SimpleNamespace

    from posttrain.rollout.native.build import cached_heads

    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
    assert cached_heads(SimpleNamespace(num_attention_heads=16, **latent)) == (16, 192)
    grouped = SimpleNamespace(num_attention_heads=16, num_key_value_heads=4, hidden_size=512)
    assert cached_heads(grouped) == (4, 32)


@pytest.mark.parametrize(
    "kind, changed",
    [
        ("qwen3-moe", {"hidden_act": "gelu"}),
        ("olmoe", {"clip_qkv": 0.5}),
    ],
)
def test_mixtures_that_compute_otherwise_take_the_general_way_and_are_right(kind, changed):
    module = tiny(kind, **changed)
    assert not can_decode_fast(module)
    output = generate(native(module), [PROMPTS[1]], [Sampling(max_tokens=9)], [0])[0]
    expected = plain_log_probs(tiny(kind, attention="eager", **changed), PROMPTS[1], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)


def test_experts_that_something_stands_beside_take_the_general_way():
    for part in ("experts", "shared_expert_gate"):
        module = tiny("qwen2-moe")
        assert can_decode_fast(module)
        changed = getattr(module.model.layers[1].mlp, part)
        changed.__class__ = type("Wrapped", (type(changed),), {})
        assert not can_decode_fast(module), part


def test_a_mixture_is_not_cut_over_several_workers():
    with pytest.raises(UserError, match=r"tensor_model_parallel_size=2: models of the kind qwen3_moe cannot be cut"):
        check_can_cut(tiny("qwen3-moe"), True, 2)


@pytest.mark.parametrize(
    "kind", ["gemma2", "gpt-oss", "deepseek-v2", pytest.param("deepseek-v3", marks=pytest.mark.slow)]
)
def test_the_general_decoder_preempts_rows_and_follows_weights_that_change_in_place(kind):
    module = tiny(kind)
    per_token = bytes_per_token(module, 1, True)
    engine = build_native(module, RolloutConfig(kv_cache_gb=10.5 * BLOCK * per_token / 2**30), decode=None)[0]
    assert engine.pool.limit == 10, "too few blocks for all rows at once"
    for version in range(2):
        outputs = generate(engine, PROMPTS, [Sampling(max_tokens=40)] * 6, range(6))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = plain_log_probs(module, prompt, output.token_ids)
            torch.testing.assert_close(torch.tensor(output.log_probs), expected, rtol=0, atol=1e-5)
        with torch.no_grad():
            for weight in module.parameters():
                weight.mul_(1.1)
        engine.load_weights((), version)


@pytest.mark.parametrize("kind", ["deepseek-v2", "deepseek-v3"])
def test_a_cache_of_latents_is_as_small_as_its_plan(kind):
    """A latent and the rotated part of a token in each layer, instead of keys and values of all heads."""
    module, given = tiny(kind), ([list(range(40)), [5]], [Sampling(max_tokens=9)] * 2, range(2))
    engine = build_native(module, RolloutConfig(), decode=None)[0]
    ours = generate(engine, *given)
    held = sum(tensor.nbytes for cache in engine.pool.layers.values() for tensor in cache)
    assert held == engine.pool.size * BLOCK * bytes_per_token(module, latents=True)
    assert (bytes_per_token(module, latents=True), bytes_per_token(module)) == (3 * (20 + 8) * 4, 2 * 3 * 4 * 20 * 4)
    for one, other in zip(ours, generate(HFEngine(module, pad_token_id=0), *given), strict=True):
        assert one.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5)
