"""Several rewards as one: the sum of weight x score over the functions of `reward.functions`, each recorded by name.

`acc` and `pred` are those of the first function that judges answers; other parts of a function are recorded as
`<name>_<part>`. A function with `needs` counts only where the named one found the response right. One that does not
apply to a response (TRL's None) is left out of its sum. One that fails on a response fails it as a whole, and the error
names it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from posttrain.rewards.outcomes import NONE_APPLIES, TOO_LARGE, Outcome, ScoreItems, is_usable
from posttrain.rewards.signatures import Fields
from posttrain.rewards.types import RewardPart

_OWN = ("acc", "pred", "answer")
RIGHT = 0.5
"""A response with this score (or this `acc`) counts as right."""


class Combined:
    """Scores responses by all parts; call it with one response or with a group."""

    def __init__(self, parts: Sequence[tuple[RewardPart, ScoreItems]]) -> None:
        self.parts = parts
        self.judge = next((part.name for part, _ in parts if part.spec.kind != "shape"), None)

    def __call__(self, items: Sequence[Fields]) -> list[Outcome]:
        columns = {part.name: score(items) for part, score in self.parts}
        return [self._row({name: column[row] for name, column in columns.items()}) for row in range(len(items))]

    def _row(self, outcomes: dict[str, Outcome]) -> Outcome:
        total, parts, errors, applied = 0.0, {}, [], 0
        for part, _ in self.parts:
            score, own, error = outcomes[part.name]
            if error is not None:
                errors.append(f"{part.name}: {error}")
                continue
            if not math.isnan(score):
                if part.needs and not _is_right(outcomes[part.needs]):
                    score = 0.0
                total += part.weight * score
                parts[part.name] = score
                applied += 1
            for name, value in own.items():
                key = name if name in _OWN else f"{part.name}_{name}"
                parts.setdefault(key, value)
        if self.judge is not None and outcomes[self.judge][2] is None and not math.isnan(outcomes[self.judge][0]):
            parts.setdefault("acc", float(_is_right(outcomes[self.judge])))
        if not errors and not applied:
            errors.append(NONE_APPLIES)
        if not errors and not is_usable(total):
            errors.append(f"the weighted sum is {total:g}{TOO_LARGE}")
        return total, parts, "\n".join(errors) or None


def _is_right(outcome: Outcome) -> bool:
    score, parts, error = outcome
    acc = parts.get("acc", score)
    return error is None and not isinstance(acc, str) and acc >= RIGHT
