"""The line of a step: reward, signal, KL, clipping, length, speed, and the stage that bounds it.

`StepFacts` is what the line and the rules of the diagnosis may use: the metrics of this step and of those before it,
and a few settings of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from posttrain.tracking.row import STAGE_WORDS

WINDOW = 10  # steps over which a trend is judged; none is claimed before there are that many
# A change counts above this many deviations: rules look again at every step, so that two would often be passed.
SIGMAS = 3.0
# Median difference of two draws -> deviation of one, for normal scatter.
_OF_NEIGHBOURS = 1 / (0.6745 * math.sqrt(2))


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
    grouped: bool = True  # whether advantages compare the responses of a group
    samples_freq: int = 1  # every how many steps samples are kept; 0 is never


@dataclass
class StepFacts:
    """The present step's metrics and those before it, oldest first."""

    now: Mapping[str, float]
    past: Sequence[Mapping[str, float]] = ()
    run: RunFacts = field(default_factory=RunFacts)
    reward_error: str = ""  # the error that most of this step's rewards had that failed, in a line
    tool_error: str = ""  # tools whose calls of this step all failed, with their commonest errors

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


def fitted(pieces: Sequence[tuple[int, str | None]], width: int) -> str:
    """(importance, text) in order, joined; what does not fit is left out, least important first."""
    kept = [(importance, text) for importance, text in pieces if text]
    while len(kept) > 1 and len(", ".join(text for _, text in kept)) > width:
        kept.remove(min(kept))
    return ", ".join(text for _, text in kept)


def summary(known: StepFacts) -> list[tuple[int, str | None]]:
    return [
        (9, _reward(known)),
        (7, _signal(known)),
        (6, _kl(known)),
        (2, _clipping(known)),
        (5, _length(known)),
        (4, _speed(known)),
        (8, _seconds(known)),
        (3, _bound(known)),
    ]


def _reward(known: StepFacts) -> str | None:
    """With its change over the window where that is more than scatter."""
    reward, change = known.get("reward_mean"), known.change("reward_mean")
    if reward is None:
        return None
    trend = "" if change is None or known.is_noise("reward_mean") else f" ({change:+.3f})"
    return f"reward {reward:.3f}{trend}"


def _signal(known: StepFacts) -> str | None:
    share = known.get("groups/no_signal")
    return None if share is None or not known.run.grouped else f"{share:.0%} no signal"


def _kl(known: StepFacts) -> str | None:
    kl = known.get("kl_loss")
    return f"KL {kl:.2g}" if kl is not None and known.run.kl_on else None


def _clipping(known: StepFacts) -> str | None:
    clipped = known.get("actor/pg_clipfrac")
    return None if clipped is None else f"clip {clipped:.1%}"


def _length(known: StepFacts) -> str | None:
    length, change = known.get("response_length"), known.change("response_length")
    if length is None:
        return None
    still = change is None or not round(change) or known.is_noise("response_length")
    drift = "" if still else f" ({change:+.0f})"
    return f"length {length:.0f}{drift}"


def _speed(known: StepFacts) -> str | None:
    speed = known.get("perf/throughput")
    return None if speed is None else f"{speed:,.0f} tok/s"


def _times(known: StepFacts) -> tuple[float, dict[str, float]]:
    """(seconds of the step, seconds of its stages)."""
    prefix = "timing_s/"
    times = {name.removeprefix(prefix): value for name, value in known.now.items() if name.startswith(prefix)}
    total = times.pop("step", None) or math.fsum(times.values())
    return total, times


def _seconds(known: StepFacts) -> str | None:
    total, _ = _times(known)
    return f"{total:.1f} s" if total > 0 else None


def _bound(known: StepFacts) -> str | None:
    """The stage that bounds the step and its share, if it takes more than half of it."""
    total, times = _times(known)
    first = max(times, key=lambda name: times[name], default=None)
    if first is None or times[first] <= total / 2:
        return None
    return f"{STAGE_WORDS.get(first, first)}-bound {times[first] / total:.0%}"


def stage_shares(metrics: Mapping[str, float]) -> str | None:
    """Where a step's time went, longest first."""
    total, times = _times(StepFacts(metrics))
    ordered = sorted(times.items(), key=lambda item: -item[1])
    shares = [f"{STAGE_WORDS.get(name, name)} {value / total:.0%}" for name, value in ordered if total > 0]
    return ", ".join(shares) or None
