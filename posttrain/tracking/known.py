"""Known: what rules may use of a run: the metrics of this step and of those before, and a few of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

WINDOW = 10
"""Steps over which a trend is judged; none is claimed before there are that many."""
SIGMAS = 3.0
"""A change counts above this many deviations: rules look again at every step, so that two would often be passed."""
_OF_NEIGHBOURS = 1 / (0.6745 * math.sqrt(2))
"""Median difference of two draws -> deviation of one, for normal scatter."""


@dataclass
class RunFacts:
    """The settings that rules speak about."""

    kl_on: bool = False
    lr: float | None = None
    kl_coef: float | None = None
    n: int = 1
    temperature: float = 1.0
    clip_ratio: float = 0.2
    loss_agg_mode: str = "token-mean"
    grouped: bool = True
    """Whether advantages compare the responses of a group."""
    samples_freq: int = 1
    """Every how many steps samples are kept; 0 is never."""


@dataclass
class Known:
    """The present step's metrics and those before it, oldest first."""

    now: Mapping[str, float]
    past: Sequence[Mapping[str, float]] = ()
    run: RunFacts = field(default_factory=RunFacts)
    reward_error: str = ""
    """The error that most of this step's rewards had that failed, in a line."""
    tool_error: str = ""
    """Tools whose calls of this step all failed, with their commonest errors."""

    def get(self, name: str) -> float | None:
        """The present value, None if it is absent or not finite."""
        return _finite(self.now.get(name))

    def series(self, name: str, last: int | None = None) -> list[float]:
        """The values of the last steps, this one included, those that are present and finite."""
        values = [_finite(metrics.get(name)) for metrics in [*self.past, self.now]]
        found = [value for value in values if value is not None]
        return found if last is None else found[-last:]

    def change(self, name: str) -> float | None:
        """By how much the mean of the window's second half exceeds its first half's; None before the window is full."""
        values = self.series(name, WINDOW)
        if len(values) < WINDOW:
            return None
        half = WINDOW // 2
        return math.fsum(values[half:]) / (WINDOW - half) - math.fsum(values[:half]) / half

    def start(self, name: str, steps: int = 3) -> float | None:
        """The mean of the first steps; None before there are twice as many."""
        values = self.series(name)
        return math.fsum(values[:steps]) / steps if len(values) >= 2 * steps else None

    def lately(self, name: str, steps: int = 3) -> float | None:
        """The mean of the last steps, this one included."""
        values = self.series(name, steps)
        return math.fsum(values) / len(values) if values else None

    def since_start(self, name: str, steps: int = 3) -> float | None:
        """By how much the last steps' mean exceeds the first steps'; None before there are twice as many."""
        start, now = self.start(name, steps), self.lately(name, steps)
        return None if start is None or now is None else now - start

    def scatter(self, name: str) -> float:
        """The deviation of one step's value, by the usual difference of neighbouring steps: a jump or a trend hardly
        changes it."""
        values = self.series(name)
        moves = sorted(abs(after - before) for before, after in pairwise(values))
        return _OF_NEIGHBOURS * moves[len(moves) // 2] if moves else 0.0

    def is_noise(self, name: str, change: float | None = None, of: int = WINDOW // 2) -> bool:
        """Whether a change (unset: that over the window) between two means of `of` steps may be scatter."""
        moved = abs(self.change(name) or 0.0) if change is None else abs(change)
        return moved <= SIGMAS * self.scatter(name) * math.sqrt(2 / of)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
