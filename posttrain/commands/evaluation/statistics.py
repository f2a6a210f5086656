"""Estimates and intervals, on numbers alone. Prompts are the units: responses to one prompt are not independent.

maj@k       the share of right answers if k of a prompt's n responses, drawn at random in random order, vote: the most
            frequent answer counts, of equals the one given first; those without an answer do not vote, unless none
            has one. Exact, over all draws. (pass@k, likewise over all draws, is `tracking.metrics.pass_at_k`.)
Wilson      interval for a share of prompts, where every prompt's value is 0 or 1 (Wilson 1927).
bootstrap   percentile interval for a mean over prompts: prompts are drawn anew with a fixed seed.
sign flip   paired test: if two models were the same, each prompt's difference could as well have the other sign.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 20_240_607
EXACT_UP_TO = 16  # differences other than 0 up to which the sign-flip test looks at all 2^m signs
_CHUNK = 2_000_000


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval; `method` is `wilson`, `bootstrap` or `none` (a single prompt)."""

    value: float
    low: float | None
    high: float | None
    method: str


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt: Wilson's interval where all values are 0 or 1, otherwise the bootstrap's."""
    numbers = np.asarray(values, dtype=np.float64)
    mean = math.fsum(numbers) / len(numbers)  # exact: the same numbers in any order give the same mean
    # The bootstrap of values that are all 0 or all 1 is an interval of width 0, which claims too much.
    if np.isin(numbers, (0.0, 1.0)).all():
        return Estimate(mean, *wilson(int(numbers.sum()), len(numbers)), "wilson")
    if len(numbers) < 2:
        return Estimate(mean, None, None, "none")
    return Estimate(mean, *bootstrap(numbers), "bootstrap")


def wilson(right: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Interval of a share of `total` independent trials of which `right` succeeded."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, extra = right / total, z * z / total
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / total + extra / (4 * total)) / (1 + extra)
    low, high = middle - half, middle + half
    return (0.0 if right == 0 else low), (1.0 if right == total else high)  # there only rounding is left


def bootstrap(values: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Percentile interval of the mean; the same values give the same interval."""
    means = _resampled_means(np.asarray(values, dtype=np.float64))
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    # A fixed seed: two reports of the same responses must not differ.
    generator, count = np.random.default_rng(SEED), len(values)
    at_once = max(1, _CHUNK // count)  # 16 MB of indices at a time, whatever the number of prompts
    parts = []
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        parts.append(values[generator.integers(0, count, (rows, count))].mean(axis=1))
    return np.concatenate(parts)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the sum of paired differences under random signs; prompts without one say nothing."""
    sizes = np.abs([d for d in differences if d != 0])
    if not len(sizes):
        return 1.0
    seen = abs(math.fsum(d for d in differences if d != 0)) * (1 - 1e-12)  # equal sums must not differ by rounding
    if len(sizes) <= EXACT_UP_TO:
        bits = (np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1
        return float(np.mean(np.abs((2 * bits - 1) @ sizes) >= seen))
    generator, hits = np.random.default_rng(SEED), 0
    at_once = max(1, _CHUNK // len(sizes))
    for start in range(0, RESAMPLES, at_once):
        signs = generator.integers(0, 2, (min(at_once, RESAMPLES - start), len(sizes))) * 2 - 1
        hits += int((np.abs(signs @ sizes) >= seen).sum())
    return (hits + 1) / (RESAMPLES + 1)  # the observed signs are one of the possible ones


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[float], k: int) -> float:
    """maj@k of one prompt. `right` is 1 or 0 per response; of a class of equal answers their mean counts."""
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} needs at least {k} responses; there are {len(answers)}")
    sums: Counter[Hashable | None] = Counter()
    for answer, value in zip(answers, right, strict=True):
        sums[answer] += value  # pyright: ignore
    counts = Counter(answers)
    classes = sorted((count, sums[answer] / count) for answer, count in counts.items() if answer is not None)
    silent = counts.get(None, 0)
    # By the sizes of the classes alone, so that prompts with the same split share one computation.
    return _majority(tuple(classes), (silent, sums[None] / silent if silent else 0.0), k)


@lru_cache(maxsize=100_000)
def _majority(classes: tuple[tuple[int, float], ...], silent: tuple[int, float], k: int) -> float:
    """Expected share over all draws of k from classes (size, share right). Of tied answers each is first equally often.

    For each number m of votes that wins: ways[s, t] to draw s voters with no class above m votes and t classes at m;
    credit[s, t] is the same with each way weighted by the sum of its tied classes' shares.
    """
    total = 0.0
    for m in range(1, k + 1):
        most_tied = k // m
        ways, credit = np.zeros((k + 1, most_tied + 1)), np.zeros((k + 1, most_tied + 1))
        ways[0, 0] = 1.0
        # Adding one class of equal answers at a time keeps this polynomial; over all draws it would be exponential.
        for size, share in classes:
            new_ways, new_credit = np.zeros_like(ways), np.zeros_like(credit)
            for votes in range(min(size, m - 1, k) + 1):
                draws = math.comb(size, votes)
                new_ways[votes:] += draws * ways[: k + 1 - votes]
                new_credit[votes:] += draws * credit[: k + 1 - votes]
            if size >= m:
                draws = math.comb(size, m)
                new_ways[m:, 1:] += draws * ways[: k + 1 - m, :-1]
                new_credit[m:, 1:] += draws * (credit[: k + 1 - m, :-1] + share * ways[: k + 1 - m, :-1])
            ways, credit = new_ways, new_credit
        ties = np.arange(1, most_tied + 1)
        for voters in range(max(m, k - silent[0]), k + 1):
            total += math.comb(silent[0], k - voters) * float((credit[voters, 1:] / ties).sum())
    if silent[0] >= k:
        total += math.comb(silent[0], k) * silent[1]
    return total / math.comb(silent[0] + sum(size for size, _ in classes), k)
