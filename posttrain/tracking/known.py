"""Known: what rules may use of a run: the metrics of this step and of those before, and a few of its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WINDOW = 10
"""Steps over which a trend is judged; none is claimed before there are that many."""


@dataclass
class RunFacts:
    """The settings that rules speak about."""

    kl_on: bool = False
    lr: float | None = None
    kl_coef: float | None = None
    n: int = 1
    clip_ratio: float = 0.2
    loss_agg_mode: str = "token-mean"
    grouped: bool = True
    """Whether advantages compare the responses of a group."""


@dataclass
class Known:
    """The present step's metrics and those before it, oldest first."""

    now: Mapping[str, float]
    past: Sequence[Mapping[str, float]] = ()
    run: RunFacts = field(default_factory=RunFacts)

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

    def is_noise(self, name: str) -> bool:
        """Whether the change over the window is within twice what the scatter of its halves explains."""
        values, half = self.series(name, WINDOW), WINDOW // 2
        scatter = math.sqrt((_variance(values[:half]) + _variance(values[half:])) / half)
        return abs(self.change(name) or 0.0) <= 2 * scatter


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _variance(values: Sequence[float]) -> float:
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / max(1, len(values) - 1)
