"""Validation metrics per data source: mean@k, std@k, pass@k and maj@k over the k responses of each prompt.

mean@k  mean score
std@k   mean over prompts of the sample deviation of the scores
pass@k  probability that one of k responses, drawn from the n of a prompt, is right: 1 - C(n-c, k) / C(n, k) with c
        right ones, the unbiased estimate (Chen et al. 2021, arXiv 2107.03374)
maj@k   score of the answer that most of the k responses gave (of equals, the one given first)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.tracking.fields import groups_of
from posttrain.tracking.metrics import mean, right_answers, sample_deviation

ANSWER_PARTS = ("pred", "answer", "extracted")


def validation_metrics(
    *,
    data_sources: Sequence[str],
    uids: Sequence[Hashable],
    scores: Sequence[float],
    parts: Sequence[Mapping[str, Any]] | None = None,
    answers: Sequence[str | None] | None = None,
) -> dict[str, float]:
    """`val/<data_source>/mean@k` and so on, from one entry per response.

    Responses of one prompt share a `uid`. `answers` are what responses answered, for maj@k; unset they are taken from
    the reward's part `pred` (or `answer`, `extracted`), and without any there is no maj@k.
    """
    parts = parts if parts is not None else [{}] * len(scores)
    values = np.asarray(scores, dtype=np.float64)
    right = right_answers(values, parts)
    answered = list(answers) if answers is not None else [answer_of(part) for part in parts]
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(data_sources):
        rows = np.asarray([row for row, own in enumerate(data_sources) if own == source])
        groups = [rows[members] for members in groups_of(uids[row] for row in rows)]
        named = _source_metrics(groups, values, right, parts, answered)
        metrics |= {f"val/{source}/{name}": value for name, value in named}
    return metrics


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that at least one of `k` responses, drawn from `n` of which `right` are right, is right."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} responses; there are {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_row(answers: Sequence[str | None]) -> int:
    """Position of the first response that gave the most frequent answer; responses without one do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0
    most = max(votes.values())
    return next(row for row, answer in enumerate(answers) if answer is not None and votes[answer] == most)


def _source_metrics(
    groups: list[np.ndarray],
    scores: np.ndarray,
    right: np.ndarray,
    parts: Sequence[Mapping[str, Any]],
    answers: list[str | None],
) -> Iterator[tuple[str, float]]:
    n = min(len(rows) for rows in groups)
    yield f"mean@{n}", mean(mean(scores[rows]) for rows in groups)
    if n > 1:
        yield f"std@{n}", mean(sample_deviation(scores[rows]) for rows in groups)
    for k in (*(2**power for power in range(n.bit_length()) if 2**power < n), n):
        yield f"pass@{k}", mean(pass_at_k(len(rows), int(right[rows].sum()), k) for rows in groups)
    if n > 1 and any(answers[row] is not None for rows in groups for row in rows):
        chosen = [rows[majority_row([answers[row] for row in rows])] for rows in groups]
        yield f"maj@{n}", mean(scores[chosen])
    members = [row for rows in groups for row in rows]
    for name in sorted({name for row in members for name in parts[row]}):
        numbers = [parts[row][name] for row in members if isinstance(parts[row].get(name), bool | int | float)]
        if numbers:
            yield f"{name}/mean@{n}", mean(numbers)


def has_answer(part: Mapping[str, Any]) -> bool:
    """Whether a reward's parts say what was read, be it nothing."""
    return any(part.get(name) is not None for name in ANSWER_PARTS)


def answer_of(part: Mapping[str, Any]) -> str | None:
    """What a response answered by its reward's parts; a reward that read nothing gives an empty text."""
    found = next((part[name] for name in ANSWER_PARTS if part.get(name) is not None), None)
    return None if found is None or found == "" else str(found)
