"""Scores for an evaluation: the reward that the settings name, in worker processes as in training.

Numbers are made per prompt first, then as means over prompts with intervals.

Estimates and intervals, on numbers alone. Prompts are the units: responses to one prompt are not independent.

maj@k       the share of right answers if k of a prompt's n responses, drawn at random in random order, vote: the most
            frequent answer counts, of equals the one given first; those without an answer do not vote, unless none
            has one. Exact, over all draws. (pass@k, likewise over all draws, is `tracking.metrics.pass_at_k`.)
Wilson      interval for a share of prompts, where every prompt's value is 0 or 1 (Wilson 1927).
bootstrap   percentile interval for a mean over prompts: prompts are drawn anew with a fixed seed.
sign flip   paired test: if two models were the same, each prompt's difference could as well have the other sign.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Self

import numpy as np

from posttrain.config.root import PPOConfig
from posttrain.conversations.settings import agent_settings
from posttrain.rewards.loading import check_columns, resolve_reward
from posttrain.rewards.types import RewardItem, RewardResult, all_failed_error
from posttrain.tracking.metrics import has_answer, mean, pass_at_k, right_answers

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


def wilson(right: int, total: int) -> tuple[float, float]:
    """Interval of a share of `total` independent trials of which `right` succeeded."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, extra = right / total, z * z / total
    middle = (share + extra / 2) / (1 + extra)
    half = z * math.sqrt(share * (1 - share) / total + extra / (4 * total)) / (1 + extra)
    low, high = middle - half, middle + half
    return (0.0 if right == 0 else low), (1.0 if right == total else high)  # there only rounding is left


def bootstrap(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Percentile interval of the mean; the same values give the same interval."""
    means = _resampled_means(np.asarray(values, dtype=np.float64))
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
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


ALL = "all"  # name of the row over all data sources


@dataclass
class ScoredPrompt:
    """One prompt with the responses to it and what the reward made of them."""

    messages: Any  # the conversation that was asked
    prompt: str  # the same as the text that a model reads, for the samples
    data_source: str
    ground_truth: Any
    responses: list[str]
    scores: list[float]
    parts: list[dict[str, Any]]
    errors: list[str | None]
    finish_reasons: list[str | None]
    tokens: list[int | None]
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[list[int]] = field(default_factory=list)
    # With tools, as are those that follow: which tokens the model wrote.
    marks: list[list[bool]] = field(default_factory=list)
    own_words: list[str] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    tool_calls: list[str] = field(default_factory=list)

    @property
    def right(self) -> list[float]:
        """1 or 0 per response: by the reward's `acc`, otherwise by its score reaching 0.5."""
        return right_answers(np.asarray(self.scores, dtype=np.float64), self.parts).astype(float).tolist()

    @property
    def answers(self) -> list[str | None]:
        """What each response answered: as the reward read it, or, if it does not say, as answers usually stand."""
        from posttrain.trainer.ppo.validate import given_answer  # imports torch, which `eval compare` does without

        rows = zip(self.own_words or self.responses, self.parts, self.errors, strict=True)
        return [given_answer(self.data_source, *row) for row in rows]


def keys_of(prompts: Sequence[ScoredPrompt]) -> list[str]:
    """A name for each prompt that is the same wherever the same question is asked; repeated ones are numbered."""
    seen: dict[str, int] = {}
    keys = []
    for prompt in prompts:
        text = json.dumps([prompt.data_source, prompt.messages, prompt.ground_truth], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        seen[key] = seen.get(key, 0) + 1
        keys.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
    return keys


def per_prompt(prompts: Sequence[ScoredPrompt]) -> dict[str, list[float]]:
    """Metric -> one value per prompt: reward, accuracy, and pass@k and maj@k for k up to the fewest responses."""
    fewest = min(len(prompt.responses) for prompt in prompts)
    values: dict[str, list[float]] = {
        "reward": [mean(prompt.scores) for prompt in prompts],
        "accuracy": [mean(prompt.right) for prompt in prompts],
    }
    ks = [2**power for power in range(1, fewest.bit_length()) if 2**power < fewest] + ([fewest] if fewest > 1 else [])
    for k in ks:
        values[f"pass@{k}"] = [pass_at_k(len(p.responses), round(sum(p.right)), k) for p in prompts]
    if any(answer is not None for prompt in prompts for answer in prompt.answers):
        for k in ks:
            values[f"maj@{k}"] = [majority_at_k(prompt.answers, prompt.right, k) for prompt in prompts]
    return values


def summary(prompts: Sequence[ScoredPrompt], values: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Data source -> its numbers; with several sources also `all`, in which every prompt counts once."""
    sources = list(dict.fromkeys(prompt.data_source for prompt in prompts))
    rows = {source: [i for i, prompt in enumerate(prompts) if prompt.data_source == source] for source in sources}
    if len(sources) > 1:
        rows[ALL] = list(range(len(prompts)))
    return {name: _numbers([prompts[i] for i in chosen], values, chosen) for name, chosen in rows.items()}


def _numbers(prompts: list[ScoredPrompt], values: dict[str, list[float]], rows: list[int]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, column in values.items():
        found = estimate([column[row] for row in rows])
        metrics[name] = {"value": found.value, "low": found.low, "high": found.high, "interval": found.method}
    reasons = [reason for prompt in prompts for reason in prompt.finish_reasons if reason is not None]
    answers = [answer for prompt in prompts for answer in prompt.answers]
    # A reward that never says what it read, on responses in which nothing can be found, tells nothing about answers.
    known = any(map(has_answer, (part for prompt in prompts for part in prompt.parts))) or any(answers)
    lengths = [tokens for prompt in prompts for tokens in prompt.tokens if tokens is not None]
    return {
        "prompts": len(prompts),
        "responses": sum(len(prompt.responses) for prompt in prompts),
        "metrics": metrics,
        "truncated": mean(reason == "length" for reason in reasons) if reasons else None,
        "mean_length": mean(lengths) if lengths else None,
        "without_answer": mean(answer is None for answer in answers) if known else None,
        "reward_failures": sum(error is not None for prompt in prompts for error in prompt.errors),
    }


UNKNOWN = "unknown"


class Scoring:
    """`feed` the responses to a prompt as they come, `finish` for all scores. Use `with`."""

    def __init__(self, config: PPOConfig, sources: Iterable[str | None], say: Callable[[str], Any]) -> None:
        # Here, because it imports torch: two reports are compared without it.
        from posttrain.trainer.ppo.reward import make_reward_pool

        limits = config.reward
        self._default = config.data.data_source
        self._spec = resolve_reward(config.custom_reward_function, functions=limits.functions)
        found = {source or self._default for source in sources}
        by_agent = agent_settings(config.actor_rollout_ref.rollout.agent).enable
        self._pool = make_reward_pool(self._spec, limits, found, say, check=not by_agent)
        self._failed, self._given = limits.failure_score, dict[Any, RewardResult]()

    @property
    def label(self) -> str:
        return self._spec.label

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.__exit__(*exc)

    def check_columns(self, known: Collection[str]) -> None:
        """RewardError where the reward takes a column of the rows that there is not."""
        check_columns(self._spec, known)

    def source(self, data_source: str | None) -> str:
        """The data source under which a prompt is reported."""
        return data_source or self._default or UNKNOWN

    def feed(
        self,
        prompt: int,
        responses: list[str],
        tokens: list[int | None],
        *,
        data_source: str | None,
        ground_truth: Any,
        extra_info: Any,
        asked: Any = None,
        token_ids: Sequence[Sequence[int]] | None = None,
        more: Sequence[dict[str, Any]] = (),
        by_agent: Sequence[dict[str, Any] | None] = (),
    ) -> None:
        """Score the responses to one prompt; returns at once. `asked` (the prompt, as the data has it) and `token_ids`
        are for functions of TRL's form. `more` is what several turns add to each `extra_info`, `own_words` among it;
        `by_agent` are results that an agent gave itself."""
        given = {number: RewardResult(**one) for number, one in enumerate(by_agent) if one is not None}
        for number, result in given.items():
            result.score = result.score if result.error is None else self._failed
            self._given[prompt, number] = result
        items = [
            RewardItem(
                data_source=data_source or self._default,
                solution_str=text,
                ground_truth=ground_truth,
                extra_info={**(extra_info or {}), **facts} if facts else extra_info,
                group=prompt,
                group_size=len(responses) - len(given),
                tokens=length,
                own_words=facts.get("own_words"),
                prompt=asked,
                token_ids=ids,
            )
            for text, length, facts, ids in zip(
                responses,
                tokens,
                more or [{}] * len(responses),
                token_ids or [None] * len(responses),
                strict=True,
            )
        ]
        self._pool.submit_many([((prompt, at), item) for at, item in enumerate(items) if at not in given])

    def finish(self) -> dict[Any, RewardResult]:
        """(prompt, number of the response) -> its result, for all that was fed; AllFailed if none has a score."""
        results = {**self._given, **self._pool.wait_all()}
        errors = [result.error for result in results.values() if result.error is not None]
        if results and len(errors) == len(results):
            raise all_failed_error(errors, "reward", self.label)
        return results
