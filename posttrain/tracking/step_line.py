"""The line of a step: reward, signal, KL, clipping, length, speed, and the stage that bounds it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from posttrain.tracking.known import Known
from posttrain.tracking.row import STAGE_WORDS


def fitted(pieces: Sequence[tuple[int, str | None]], width: int) -> str:
    """(importance, text) in order, joined; what does not fit is left out, least important first."""
    kept = [(importance, text) for importance, text in pieces if text]
    while len(kept) > 1 and len(", ".join(text for _, text in kept)) > width:
        kept.remove(min(kept))
    return ", ".join(text for _, text in kept)


def summary(known: Known) -> list[tuple[int, str | None]]:
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


def _reward(known: Known) -> str | None:
    """With its change over the window where that is more than scatter."""
    reward, change = known.get("reward_mean"), known.change("reward_mean")
    if reward is None:
        return None
    trend = "" if change is None or known.is_noise("reward_mean") else f" ({change:+.3f})"
    return f"reward {reward:.3f}{trend}"


def _signal(known: Known) -> str | None:
    share = known.get("groups/no_signal")
    return None if share is None or not known.run.grouped else f"{share:.0%} no signal"


def _kl(known: Known) -> str | None:
    kl = known.get("kl_loss")
    return f"KL {kl:.2g}" if kl is not None and known.run.kl_on else None


def _clipping(known: Known) -> str | None:
    clipped = known.get("actor/pg_clipfrac")
    return None if clipped is None else f"clip {clipped:.1%}"


def _length(known: Known) -> str | None:
    length, change = known.get("response_length"), known.change("response_length")
    if length is None:
        return None
    still = change is None or not round(change) or known.is_noise("response_length")
    drift = "" if still else f" ({change:+.0f})"
    return f"length {length:.0f}{drift}"


def _speed(known: Known) -> str | None:
    speed = known.get("perf/throughput")
    return None if speed is None else f"{speed:,.0f} tok/s"


def _times(known: Known) -> tuple[float, dict[str, float]]:
    """(seconds of the step, seconds of its stages)."""
    prefix = "timing_s/"
    times = {name.removeprefix(prefix): value for name, value in known.now.items() if name.startswith(prefix)}
    total = times.pop("step", None) or math.fsum(times.values())
    return total, times


def _seconds(known: Known) -> str | None:
    total, _ = _times(known)
    return f"{total:.1f} s" if total > 0 else None


def _bound(known: Known) -> str | None:
    """The stage that bounds the step and its share, if it takes more than half of it."""
    total, times = _times(known)
    first = max(times, key=lambda name: times[name], default=None)
    if first is None or times[first] <= total / 2:
        return None
    return f"{STAGE_WORDS.get(first, first)}-bound {times[first] / total:.0%}"


def stage_shares(metrics: Mapping[str, float]) -> str | None:
    """Where a step's time went, longest first."""
    total, times = _times(Known(metrics))
    ordered = sorted(times.items(), key=lambda item: -item[1])
    shares = [f"{STAGE_WORDS.get(name, name)} {value / total:.0%}" for name, value in ordered if total > 0]
    return ", ".join(shares) or None
