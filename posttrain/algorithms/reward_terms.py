"""The parts of a reward: which of them count, their weights, and one number per part and response.

The first of these rules that gives any parts decides which count:

    1. the parts that the user named (algorithm.gdpo_reward_keys); `score` is the function's score itself
    2. the terms of the run's weighted sum: reward.functions, or a reward model and a function
    3. the numbers that a reward function returned besides its score, except those about the answer (NOT_REWARDS)
    4. the score

If it is on, the penalty of overlong responses is always one of them. A part that a response lacks (its reward failed,
or returned None, NaN or a text) counts as the failure score.

Shapes: B rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from posttrain.algorithms.common import AlgorithmError
from posttrain.lazy import numpy as np

OVERLONG = "overlong_reward"
SCORE = "score"
# Parts about the answer and whether it was right; the reward includes them in its score, if at all.
NOT_REWARDS = ("acc", "pred", "answer")


class Term(NamedTuple):
    """One part of the reward."""

    name: str
    weight: float
    values_B: np.ndarray


def finite_number(value: Any) -> float | None:
    """Return the value as a float if it is a finite number, else None."""
    if not isinstance(value, Real | np.bool_) or not math.isfinite(value):
        return None
    return float(value)


def reward_terms(
    scores_B: np.ndarray,
    parts: Sequence[Mapping[str, Any] | None],
    failed_B: Sequence[bool],
    *,
    keys: Sequence[str] | None = None,
    weights: Mapping[str, float] | None = None,
    failure_score: float = 0.0,
) -> list[Term]:
    """Return the parts that count. `scores_B` are the rewards without the overlong penalty.

    `weights` are those of rule 2, and the penalty's factor under its name.
    """
    weights = dict(weights or {})
    numbers_B = [{name: finite_number(value) for name, value in (part or {}).items()} for part in parts]
    numeric = {name for row in numbers_B for name, number in row.items() if number is not None}
    overlong = weights.pop(OVERLONG, 1.0 if OVERLONG in numeric else None)
    if keys is not None:
        # The penalty is added below with its own factor; named as a key, it must not count twice.
        names = [name for name in keys if name != OVERLONG or overlong is None]
        _require_numbers(names, numeric, failed_B)
    elif weights:
        # Functions of weight 0 are recorded but do not train.
        names = [name for name, weight in weights.items() if weight != 0]
    else:
        # Sorted, so that the order of a dict cannot change the sum of floats.
        names = sorted(numeric - {*NOT_REWARDS, OVERLONG}) or [SCORE]
    columns = _columns(names, scores_B, numbers_B, failed_B, failure_score)
    terms = [Term(name, weights.get(name, 1.0), values_B) for name, values_B in zip(names, columns, strict=True)]
    if overlong:  # measured on every response, also on one whose reward failed; its factor is a weight like the others
        penalties_B = np.array([row.get(OVERLONG) or 0.0 for row in numbers_B])
        terms.append(Term(OVERLONG, overlong, penalties_B / overlong))
    return terms


def _columns(
    names: Sequence[str],
    scores_B: np.ndarray,
    numbers_B: Sequence[Mapping[str, float | None]],
    failed_B: Sequence[bool],
    failure_score: float,
) -> list[np.ndarray]:
    # (B,) per name. If a reward failed because one of these parts failed, all of them did.
    table = []
    for score, numbers, failed in zip(scores_B, numbers_B, failed_B, strict=True):
        row = [float(score) if name == SCORE else numbers.get(name) for name in names]
        # A half-scored response must not earn the parts that succeeded before the failure.
        if failed and None in row:
            row = [None] * len(row)
        table.append([failure_score if number is None else number for number in row])
    return list(np.array(table, dtype=np.float64).T.reshape(len(names), len(table)))


def _require_numbers(names: Sequence[str], numeric: set[str], failed_B: Sequence[bool]) -> None:
    missing = [name for name in names if name not in numeric and name not in (SCORE, OVERLONG)]
    if missing and not all(failed_B):  # where every reward failed, nothing is known of its parts
        raise AlgorithmError(
            f"algorithm.gdpo_reward_keys: the reward has no part {', '.join(map(repr, missing))} (numbers it gave: "
            f"{', '.join(sorted(numeric)) or 'none'}). Return a dict with `score` and a number per part from it."
        )
