"""Sampling: exact filters, frequencies of the right distribution, randomness that belongs to the request."""

import numpy as np
import pytest
import torch

from posttrain.rollout.base import Sampling
from posttrain.rollout.sampling import combine_seeds, row_seeds, sample, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(setting: Sampling, rows: int = 20000, seen=()):
    return draw_all(setting, rows, seen)[:2]


def draw_all(setting: Sampling, rows: int = 2000, seen=()):
    uniform = torch.from_numpy(uniforms(np.arange(rows, dtype=np.uint64), np.zeros(rows)))
    return sample(LOGITS.expand(rows, -1), [setting] * rows, uniform, [(list(seen), [])] * rows)


def chi_squared(tokens: torch.Tensor, p: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(p)).double()
    expected = p.double() * len(tokens)
    kept = expected > 0
    assert not counts[~kept].any()
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_tempered_distribution(temperature):
    tokens, _ = draw(Sampling(max_tokens=1, temperature=temperature))
    assert chi_squared(tokens, (LOGITS / temperature).softmax(-1)) < 20.5  # 99.9% point of 5 degrees of freedom


def test_top_p_keeps_the_smallest_sufficient_set_and_log_probs_stay_unfiltered():
    p = LOGITS.softmax(-1)  # 0.56, 0.21, 0.13, 0.08, ...
    tokens, log_probs = draw(Sampling(max_tokens=1, top_p=0.7))
    assert set(tokens.tolist()) == {0, 1}
    assert chi_squared(tokens, torch.tensor([p[0], p[1], 0, 0, 0, 0]) / (p[0] + p[1])) < 10.8
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[tokens])


def test_top_k_and_min_p_keep_exactly_the_likeliest():
    assert set(draw(Sampling(max_tokens=1, top_k=3))[0].tolist()) == {0, 1, 2}
    assert set(draw(Sampling(max_tokens=1, min_p=0.2))[0].tolist()) == {0, 1, 2}  # 0.2 x the likeliest: logit > 0.39
    assert set(draw(Sampling(max_tokens=1, top_k=1))[0].tolist()) == {0}


def test_greedy_takes_the_likeliest_and_reports_its_untempered_log_prob():
    tokens, log_probs = draw(Sampling(max_tokens=1, greedy=True, temperature=0.1), rows=3)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[:1].expand(3))


def test_repetition_penalty_makes_seen_tokens_less_likely_but_not_the_reported_log_prob():
    free, _ = draw(Sampling(max_tokens=1))
    held, log_probs = draw(Sampling(max_tokens=1, repetition_penalty=2.0), seen=[0, 0, 5])
    assert (held == 0).float().mean() < (free == 0).float().mean() - 0.1
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[held])


FILTERS = {
    "top_p": (Sampling(max_tokens=1, top_p=0.7), [1, 1, 0, 0, 0, 0]),
    "top_k": (Sampling(max_tokens=1, top_k=3), [1, 1, 1, 0, 0, 0]),
    "min_p": (Sampling(max_tokens=1, min_p=0.2, temperature=1.5), [1, 1, 1, 1, 0, 0]),
    "plain": (Sampling(max_tokens=1, temperature=0.8), [1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", FILTERS)
def test_the_log_prob_of_what_was_sampled_from_counts_the_kept_tokens_alone(name):
    setting, kept = FILTERS[name]
    tokens, log_probs, drawn = draw_all(setting)
    log_p = (LOGITS / setting.temperature).log_softmax(-1)
    mass = log_p.exp()[torch.tensor(kept, dtype=torch.bool)].sum()
    torch.testing.assert_close(drawn, log_p[tokens] - mass.log())
    torch.testing.assert_close(log_probs, log_p[tokens])


def test_the_log_prob_of_what_was_sampled_from_contains_the_repetition_penalty():
    tokens, log_probs, drawn = draw_all(Sampling(max_tokens=1, repetition_penalty=2.0, top_k=2), seen=[0, 5])
    penalised = torch.tensor([1.0, 1.0, 0.5, 0.0, -1.0, -6.0]).log_softmax(-1)
    torch.testing.assert_close(drawn, penalised[tokens] - penalised[:2].exp().sum().log())
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[tokens])
    _, log_probs, drawn = draw_all(Sampling(max_tokens=1, greedy=True, repetition_penalty=2.0), rows=2, seen=[0])
    assert torch.equal(log_probs, drawn)


def test_a_row_is_sampled_alike_alone_and_among_neighbours():
    settings = [Sampling(max_tokens=1, temperature=0.3 + 0.1 * i, top_p=0.8 if i % 2 else 1.0) for i in range(8)]
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(uniforms(np.arange(8, dtype=np.uint64), np.arange(8)))
    together, _, _ = sample(logits, settings, uniform, [([], [])] * 8)
    for row in range(8):
        alone, _, _ = sample(logits[row : row + 1], settings[row : row + 1], uniform[row : row + 1], [([], [])])
        assert alone.item() == together[row].item()


def test_uniforms_are_uniform_and_differ_by_seed_and_place():
    values = uniforms(np.arange(20000, dtype=np.uint64), np.full(20000, 3))
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 99.9% point of 19 degrees of freedom
    places = uniforms(np.full(20000, 5, np.uint64), np.arange(20000))
    assert abs(np.corrcoef(places[:-1], places[1:])[0, 1]) < 0.03
    assert combine_seeds(1, 2, 3) != combine_seeds(1, 3, 2) and combine_seeds(1, 2, 3) == combine_seeds(1, 2, 3)
    assert row_seeds(50, 7, 9) == [combine_seeds(7, 9, row) for row in range(50)]
