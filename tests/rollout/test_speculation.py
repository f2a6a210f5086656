"""Drafts that are verified change no token and no log-prob; whether they are used depends on counts alone."""

import numpy as np
import pytest
import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.models.loading import fuse_and_prove
from posttrain.rollout.base import Request, Sampling
from posttrain.rollout.generate import advance, generate
from posttrain.rollout.native import drafts, speculation
from posttrain.rollout.native.build import _speculation, build_native
from posttrain.rollout.native.drafts import Drafts, PromptIndex
from posttrain.rollout.native.speculation import GAIN, LOOK, WIDEST, PassCost
from tests.machine import has_compiler
from tests.rollout.tiny import tiny

PROMPTS = [[5, 6, 7], [5, 6, 7], list(range(40)), [9, 9, 9, 9, 9], [5, 6, 7]]
SAMPLINGS = [
    Sampling(max_tokens=60),
    Sampling(max_tokens=90, temperature=0.3),
    Sampling(max_tokens=40, greedy=True, stop_token_ids=(3, 50)),
    Sampling(max_tokens=70, temperature=0.7, stop_token_ids=(11,)),
    Sampling(max_tokens=1),
]
SPECIAL = [
    Sampling(max_tokens=60, top_k=3, temperature=0.5),
    Sampling(max_tokens=50, top_p=0.6, repetition_penalty=1.3),
    Sampling(max_tokens=80, greedy=True, stop=("<41><", "<8>")),
    Sampling(max_tokens=40),
    Sampling(max_tokens=60, min_p=0.2),
]


class Always(PassCost):
    """Drafts always pay."""

    def best_width(self, rows, share, gain):
        return WIDEST


EAGER = Always(8, 1, 1, 1)


def decode(ids):
    return "".join(f"<{token}>" for token in ids)


def engine(kind="qwen2", *, exact=False, kv_cache_gb=0.05, cost=EAGER, in_rounds=True, **settings):
    config = RolloutConfig(kv_cache_gb=kv_cache_gb, **settings)
    module = fuse_and_prove(tiny(kind), kind) if exact else tiny(kind)
    made = build_native(module, config, decode=decode, exact=exact)[0]
    if not in_rounds:  # pass after pass by the host, as on a GPU and for models of more than a billion parameters
        made.rounds.tokens_per_step = 1
    if made.speculation is not None and cost is not None:
        made.speculation.cost = cost
    return made


def taught(samplings=SAMPLINGS, seeds=range(5), **settings):
    """An engine that has generated these responses once: its drafts are nearly always right."""
    made = engine(speculation="epochs", **settings)
    made.generate = lambda: generate(made, PROMPTS, samplings, list(seeds))
    made.generate()
    made.sleep()
    made.wake()
    made.take_counts()
    return made


def _with_wrong_third(draft):
    return [token if at != 2 else token // 2 for at, token in enumerate(draft)]


def assert_same(found, wanted, *, bitwise=True):
    for one, other in zip(found, wanted, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert len(one.log_probs) == len(other.log_probs) == len(one.token_ids)
        assert (one.sampling_log_probs is None) == (other.sampling_log_probs is None)
        if bitwise:
            assert np.array_equal(one.log_probs, other.log_probs)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        if one.sampling_log_probs is not None:
            np.testing.assert_allclose(one.sampling_log_probs, other.sampling_log_probs, atol=1e-5)


@pytest.mark.parametrize("samplings", [SAMPLINGS, SPECIAL])
@pytest.mark.parametrize(
    "kind",
    [
        "qwen2",
        "gemma3",
        "qwen3-moe",
        pytest.param("gpt-oss", marks=pytest.mark.slow),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_plain_decoding(kind, samplings):
    plain = generate(engine(kind), PROMPTS, samplings, list(range(5)))
    made = taught(samplings, kind=kind)
    assert_same(made.generate(), plain, bitwise=False)
    counts = made.take_counts()
    assert counts["accepted"] > 0.8 * counts["drafted"] > 50
    assert counts["verified"] > 2 * counts["passes"]
    assert counts["tokens"] == sum(len(output.token_ids) for output in plain)


@pytest.mark.skipif(not has_compiler(), reason="exact products are compiled")
@pytest.mark.parametrize("settings", [{}, {"kv_cache_gb": 3e-4}, {"max_num_seqs": 2}, {"in_rounds": False}])
def test_with_exact_no_bit_differs_whether_drafts_are_right_or_wrong(settings, monkeypatch):
    plain = generate(engine(exact=True), PROMPTS, SAMPLINGS, list(range(5)))
    made, right = taught(exact=True, **settings), PromptIndex.draft
    assert_same(made.generate(), plain)
    assert made.take_counts()["accepted"] > 50
    monkeypatch.setattr(PromptIndex, "draft", lambda *given: _with_wrong_third(right(*given)))
    assert_same(made.generate(), plain)
    counts = made.take_counts()
    assert 50 < counts["accepted"] < 0.6 * counts["drafted"]


def test_one_accepted_token_too_many_is_noticed(monkeypatch):
    plain = generate(engine(), PROMPTS, SPECIAL, list(range(5)))
    made, right, common = taught(SPECIAL), PromptIndex.draft, speculation.common_start
    monkeypatch.setattr(PromptIndex, "draft", lambda *given: _with_wrong_third(right(*given)))
    monkeypatch.setattr(
        speculation, "common_start", lambda draft, tokens: min(common(draft, tokens) + 1, len(draft), len(tokens))
    )
    assert [output.token_ids for output in made.generate()] != [output.token_ids for output in plain]


def test_turns_continue_and_aborts_give_what_there_is():
    def conversation(made):
        sampling = Sampling(max_tokens=50, temperature=0.5)
        made.submit(Request("first", PROMPTS[0], sampling, 1, keep=True))
        first = advance(made)[0]
        prompt = [*PROMPTS[0], *first.token_ids, 4, 4, 4]
        made.submit(Request("second", prompt, sampling, 2, parent="first"))
        made.submit(Request("other", PROMPTS[0], Sampling(max_tokens=80), 3))
        return [first, *advance(made)], made.abort(["second", "other"])

    plain, made = engine(), engine(speculation="batch")
    (ended, aborted), (found, left) = conversation(plain), conversation(made)
    assert_same(found, ended, bitwise=False)
    assert made.queue.continued == 1 and made.take_counts()["verified"] > 50
    longest = min(len(aborted[0].token_ids), len(left[0].token_ids))
    assert longest > 10 and aborted[0].token_ids[:longest] == left[0].token_ids[:longest]
    assert made.pool.busy == plain.pool.busy == 0 and not made.speculation.texts.rows


def test_it_starts_where_it_pays_by_counts_and_stays_off_where_it_does_not():
    """A response that was generated before, and one that was not."""
    sampling, shares = Sampling(max_tokens=200), []
    made = engine(speculation="epochs", cost=PassCost(tile=8, block=4, token=0.4, host=1))
    for seed in (0, 0, 1):
        plain = generate(engine(), PROMPTS[:1], [sampling], [seed])
        assert_same(generate(made, PROMPTS[:1], [sampling], [seed]), plain, bitwise=False)
        shares.append(made.take_counts().get("verified", 0) / 200)
        made.sleep()
        made.wake()
    assert shares[0] == shares[2] == 0 and shares[1] > 0.6, shares


def test_the_width_follows_rows_and_acceptance():
    cost = PassCost(tile=8, block=5, token=0.4, host=2)
    assert cost.best_width(1, 0.0, 1.0) == 1
    assert cost.best_width(1, 0.99, 1.0) == WIDEST
    assert 1 < cost.best_width(1, 0.7, 1.0) < WIDEST
    assert cost.best_width(64, 0.6, 1.2) == 1  # a pass of many rows costs by its tokens


def test_on_cuda_drafts_must_pay_for_the_hosts_part_of_a_pass():
    """At 0.5B, 8 responses: 4.6 times as fast with right drafts on an H200, and slower with drafts that often fail."""
    half_a_billion = torch.nn.Linear(22_000, 22_000, bias=False, device="meta")
    made = _speculation(half_a_billion, RolloutConfig(speculation="batch"), captured=True)
    assert made is not None and made.cost.best_width(8, 1.0, GAIN) == WIDEST
    assert made.cost.best_width(8, 0.7, GAIN) == 1
    assert made.cost.rate(8, WIDEST, 1.0) / made.cost.rate(8, 1, 1.0) == pytest.approx(4.6, rel=0.25)


def test_a_batch_begins_as_the_first_one_did():
    made = engine(speculation="batch")
    counts = []
    for _ in range(2):
        generate(made, PROMPTS, SAMPLINGS, list(range(5)))
        counts.append(made.take_counts())
        made.sleep()
        made.wake()
        assert not made.speculation.texts.ended and not made.speculation.texts.groups
    assert counts[0] == counts[1] and counts[0]["verified"] > 0


# -- drafts -----------------------------------------------------------------------------------------------------------
def test_drafts_are_what_followed_the_longest_match_last():
    texts = PromptIndex((1, 2, 3, 4, 5, 6, 7, 8, 9, 20), [np.array([31, 32, 2, 3, 4, 40])])
    text = [*texts.prompt]
    texts.extend(text, [60, 2, 3, 4])
    assert texts.draft(text, 3) == [40]  # the newest of the places that match three tokens: the ended response
    texts.extend(text, [5, 6, 7, 8])
    assert texts.draft(text, 5) == [9, 20]  # eight tokens match in the prompt, which ends there
    texts.extend(text, [70, 71, 70, 71, 70])
    assert texts.draft(text, 4) == [71, 70, 71, 70]  # a period goes on
    assert texts.draft([1, 2], 4) == []


def test_texts_of_ended_responses_are_bounded(monkeypatch):
    monkeypatch.setattr(drafts, "MOST_TOKENS", 100)
    monkeypatch.setattr(drafts, "MOST_TEXTS", 2)
    kept = Drafts(keep_across_batches=True)
    for prompt in range(10):
        for number in range(3):
            kept.end((prompt, number), [prompt], np.full(10, number), shared=True)
    assert kept.tokens == sum(len(text) for texts in kept.ended.values() for text in texts) == 100
    assert list(kept.ended) == [(5,), (6,), (7,), (8,), (9,)]
    assert [text[0] for text in kept.ended[9,]] == [1, 2]
    kept.end_batch()
    assert kept.tokens == 100
    assert LOOK < 64  # a look within one round of plain decoding
