"""The line of a step: reward, signal, KL, clipping, length, speed, and the stage that bounds it.

`StepFacts` is the input of this line and of the rules of the diagnosis: the metrics of this step and of those before
it, and a few settings of the run. Failures of rewards and tools are summed up in one line each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from posttrain.tracking.progress import STAGE_WORDS

WINDOW = 10  # steps over which a trend is judged; none is claimed before there are that many
# A change counts above this many deviations. Rules run at every step, so two would often be exceeded by chance.
SIGMAS = 3.0
# Median difference of two draws -> deviation of one, for normal scatter.
_OF_NEIGHBOURS = 1 / (0.6745 * math.sqrt(2))


@dataclass
class RunFacts:
    """The settings that rules refer to."""

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
    tool_error: str = ""  # tools whose calls of this step all failed, with their most frequent errors

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

    def recent_mean(self, name: str, steps: int = 3) -> float | None:
        """The mean of the last steps, this one included."""
        values = self.series(name, steps)
        return math.fsum(values) / len(values) if values else None

    def since_start(self, name: str, steps: int = 3) -> float | None:
        """By how much the last steps' mean exceeds the first steps'; None before there are twice as many."""
        start, now = self.start(name, steps), self.recent_mean(name, steps)
        return None if start is None or now is None else now - start

    def scatter(self, name: str) -> float:
        """The deviation of one step's value, from the median difference of neighbouring steps: a jump or a trend
        hardly changes it."""
        values = self.series(name)
        moves = sorted(abs(after - before) for before, after in pairwise(values))
        return _OF_NEIGHBOURS * moves[len(moves) // 2] if moves else 0.0

    def is_noise(self, name: str, change: float | None = None, of: int = WINDOW // 2) -> bool:
        """Whether a change (unset: that over the window) between two means of `of` steps may be scatter."""
        moved = abs(self.change(name) or 0.0) if change is None else abs(change)
        return moved <= SIGMAS * self.scatter(name) * math.sqrt(2 / of)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def join_within(pieces: Sequence[tuple[int, str | None]], width: int) -> str:
    """Texts of (importance, text) in order; the least important are dropped until the line fits."""
    kept = [(importance, text) for importance, text in pieces if text]
    while len(kept) > 1 and len(", ".join(text for _, text in kept)) > width:
        kept.remove(min(kept))
    return ", ".join(text for _, text in kept)


def summary(known: StepFacts) -> list[tuple[int, str | None]]:
    """(importance, text) of each part of the line; None for parts without a value."""
    total, _ = _times(known)
    share, kl, clipped = (known.get(name) for name in ("groups/no_signal", "kl_loss", "actor/pg_clipfrac"))
    speed = known.get("perf/throughput")
    return [
        (9, _reward(known)),
        (7, f"{share:.0%} no signal" if share is not None and known.run.grouped else None),
        (6, f"KL {kl:.2g}" if kl is not None and known.run.kl_on else None),
        (2, None if clipped is None else f"clip {clipped:.1%}"),
        (5, _length(known)),
        (4, None if speed is None else f"{speed:,.0f} tok/s"),
        (8, f"{total:.1f} s" if total > 0 else None),
        (3, _find_bounding_stage(known)),
    ]


def _reward(known: StepFacts) -> str | None:
    reward, change = known.get("reward_mean"), known.change("reward_mean")
    if reward is None:
        return None
    trend = "" if change is None or known.is_noise("reward_mean") else f" ({change:+.3f})"
    return f"reward {reward:.3f}{trend}"


def _length(known: StepFacts) -> str | None:
    length, change = known.get("response_length"), known.change("response_length")
    if length is None:
        return None
    still = change is None or not round(change) or known.is_noise("response_length")
    drift = "" if still else f" ({change:+.0f})"
    return f"length {length:.0f}{drift}"


def _times(known: StepFacts) -> tuple[float, dict[str, float]]:
    prefix = "timing_s/"
    times = {name.removeprefix(prefix): value for name, value in known.now.items() if name.startswith(prefix)}
    total = times.pop("step", None) or math.fsum(times.values())
    return total, times


def _find_bounding_stage(known: StepFacts) -> str | None:
    # A stage bounds the step if it takes more than half of it.
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


LONGEST = 120


def most_common_error(errors: Iterable[str | None]) -> str:
    """The most frequent error: its first text, and where it was raised."""
    texts = [error for error in errors if error]
    if not texts:
        return ""
    most = Counter(map(error_kind, texts)).most_common(1)[0][0]
    first, *frames = next(text for text in texts if error_kind(text) == most).splitlines() or [""]
    return first[:LONGEST] + (f" ({_place(frames[-1])})" if frames else "")


def error_kind(text: str) -> tuple[str, str]:
    """Errors with the same name from the same line are of one kind, whatever their message."""
    first, *frames = text.splitlines() or [""]
    return first.split(":")[0], frames[-1] if frames else ""


def _place(frame: str) -> str:
    # `my_reward.py, line 3` of ` /path/my_reward.py, line 3, in compute_score: ...`.
    file, _, rest = frame.strip().partition(", line ")
    return f"{PurePath(file).name}, line {rest.split(',')[0]}" if rest else frame.strip()[:LONGEST]


# Fewer calls than this may all fail by the model's own fault (`arguments`, `said`); a tool's own errors count from the
# first.
FEW = 4
_ASKED_WRONGLY = ("arguments", "said")
_NO_TOOL = ("unknown", "unreadable")


def failing_tools(rows: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, list[str]]:
    """By name, the errors of tools whose calls all failed."""
    by_tool: dict[str, list[str | None]] = {}
    for call in (call for row in rows for call in row):
        if _kind(call["error"]) not in _NO_TOOL:
            by_tool.setdefault(str(call["name"]), []).append(call["error"])
    failing = {}
    for name, found in sorted(by_tool.items()):
        errors = [error for error in found if error]
        own = any(_kind(error) not in _ASKED_WRONGLY for error in errors)
        if len(errors) == len(found) and (own or len(errors) >= FEW):
            failing[name] = errors
    return failing


def describe_failures(failing: Mapping[str, Sequence[str]]) -> str:
    """Each tool with its most frequent error."""
    return "; ".join(_words(name, errors) for name, errors in failing.items())


def _words(name: str, errors: Sequence[str]) -> str:
    calls = f"all {len(errors)} calls" if len(errors) > 1 else "the only call"
    most = Counter(map(_class, errors)).most_common(1)[0][0]
    first = next(error for error in errors if _class(error) == most)
    return f"{calls} of the tool {name} failed, most often: {first[:LONGEST].rstrip('.')}"


def _class(error: str) -> tuple[str, ...]:
    return tuple(error.split(":")[:2])


def _kind(error: str | None) -> str:
    return (error or "").partition(":")[0]
