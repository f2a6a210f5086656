"""The row at the bottom of a terminal: steps done, the stage with its counts and speed, and the time that is left.

    step 4/20 ━━━━────────────  15%  reward 0.459  rollout 12/64 responses, 3,210 tokens, 640 tok/s, 0:35 left

What does not fit is left out, least important first, so that the row never wraps.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.pulse import Work
from posttrain.tracking.terminal_text import styled

STAGE_WORDS = {
    "gen": "rollout",
    "greedy": "greedy rollout",
    "reward": "rewards",
    "reward_model": "reward model",
    "check": "checks",
    "old_log_prob": "old log-probs",
    "sum_pi_squared": "probabilities",
    "ref": "reference",
    "adv": "advantages",
    "update_actor": "update",
    "update_critic": "critic update",
    "sync": "weight sync",
}
SHORT_STEP = 1.0  # stages of steps below this many seconds would only flicker
_DROP = ("number", "unit", "tokens", "bar", "percent", "rate", "stage_left", "run_left", "counts", "stage")
_BAR = (6, 24)


@dataclass
class Moment:
    """What is known about a run at one moment."""

    step: int
    total: int
    done: int
    label: str = "step"
    number: str = ""
    stage: str | None = None
    stage_seconds: float = 0.0
    step_seconds: float = 0.0
    seconds_left: float | None = None
    work: Work | None = None

    def stage_parts(self) -> dict[str, str]:
        """The stage in words: its name, counts, unit, tokens, speed and the time that is left."""
        parts = {"stage": STAGE_WORDS.get(self.stage or "", self.stage or "").replace("_", " ")}
        work = self.work
        if work is None:
            return parts | {"counts": clock(self.stage_seconds) if self.stage else ""}
        parts |= {"counts": f"{work.shown:,}/{work.total:,}", "unit": work.unit}
        if work.all_tokens:
            rate = work.all_tokens / max(work.seconds, 1e-9)
            parts |= {"tokens": f"{work.all_tokens:,} tokens", "rate": f"{rate:,.0f} tok/s"}
        left = work.seconds_left
        return parts | {"stage_left": clock(self.stage_seconds) if left is None else f"{clock(left)} left"}

    def sentence(self) -> str:
        """The same for a log: one line without a bar."""
        parts = {name: text for name, text in self.stage_parts().items() if text}
        head = f"{parts.pop('stage', '')} {parts.pop('counts', '')} {parts.pop('unit', '')}".strip()
        return ", ".join([head, *parts.values()])


def progress_row(moment: Moment, width: int, *, colour: bool = False) -> str:
    """The row in at most `width` columns."""
    parts = _parts(moment)
    for name in ("", *_DROP):
        parts.pop(name, None)
        row = _join_parts(parts, "", False)
        if len(row) <= width:
            break
    room = width - len(row) - 1
    bar = _bar(moment, min(_BAR[1], room)) if "bar" in parts and room >= _BAR[0] else ""
    return _join_parts(parts, bar, colour)[: None if len(row) <= width else width]


def _parts(moment: Moment) -> dict[str, str]:
    parts = {"head": f"{moment.label} {moment.step}/{moment.total}", "bar": "", "percent": f"{_share(moment):4.0%}"}
    parts["number"] = moment.number
    if moment.step_seconds >= SHORT_STEP:
        parts |= moment.stage_parts()
    if moment.seconds_left is not None:
        parts["run_left"] = f"run {clock(moment.seconds_left)} left"
    return {name: text for name, text in parts.items() if text or name == "bar"}


def _join_parts(parts: dict[str, str], bar: str, colour: bool) -> str:
    paint = styled if colour else lambda text, style: text
    head = paint(parts["head"], "bold") + (f" {paint(bar, 'cyan')}" if bar else "")
    head += f" {parts['percent']}" if "percent" in parts else ""
    stage = " ".join(parts[name] for name in ("stage", "counts", "unit") if name in parts)
    stage = ", ".join([stage, *(parts[name] for name in ("tokens", "rate", "stage_left") if name in parts)])
    left = [paint(parts["run_left"], "dim")] if "run_left" in parts else []
    return "  ".join(text for text in (head, parts.get("number", ""), stage, *left) if text)


def _bar(moment: Moment, columns: int) -> str:
    filled = round(columns * _share(moment))
    return "━" * filled + "─" * (columns - filled)


def _share(moment: Moment) -> float:
    return min(1.0, moment.done / moment.total) if moment.total else 0.0


def clock(seconds: float) -> str:
    """0:35, 12:10, 3:05:00, 2 d 04:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
