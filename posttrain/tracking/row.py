"""The row at the bottom of a terminal: steps done, the stage with its counts and speed, and the time that is left.

    step 4/20 ━━━━────────────  15%  reward 0.459  rollout 12/64 responses, 3,210 tokens, 640 tok/s, 0:35 left

What does not fit is left out, least important first, so that the row never wraps. `LiveRow` draws it, and `waiting()`
shows one while a command does something that takes seconds, such as loading libraries.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from posttrain.pulse import Work
from posttrain.tracking.tee import active, set_active_bar, underlying_console
from posttrain.tracking.terminal_text import columns, is_terminal, styled

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
    "save_checkpoint": "saving",
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


CLEAR = "\r\x1b[K"
DRAW_EVERY = 0.2  # seconds, of a run's progress


class Every:
    """Calls `act` every `seconds`, in a thread of its own that never keeps the process alive."""

    def __init__(self, seconds: float, act: Callable[[], object]) -> None:
        self._seconds, self._act = seconds, act
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="posttrain-every", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # The wait is the pause: closing ends it at once instead of after the rest of the period.
        while not self._closed.wait(self._seconds):
            self._act()

    def close(self) -> None:
        """Once this returns, `act` is not running and will not be called again."""
        self._closed.set()
        # `act` itself may close it; a thread that joins itself would wait for ever.
        if self._thread is not threading.current_thread():
            self._thread.join()


class LiveRow:
    """Draws `text(width)` on `stream`; a closed terminal is ignored."""

    def __init__(self, stream: TextIO, text: Callable[[int], str]) -> None:
        self.stream, self._text = stream, text
        self._lock = threading.RLock()

    def draw(self) -> None:
        with self._lock:
            self._write(CLEAR + self._text(columns(self.stream) - 1))

    def clear(self) -> None:
        with self._lock:
            self._write(CLEAR)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The row is off the screen while lines are written."""
        with self._lock:
            self.clear()
            try:
                yield
            finally:
                self.draw()

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # gone or closed
            self.stream.write(text)
            self.stream.flush()


LIBRARIES = "reading torch and transformers"
COUNT_EVERY = 0.5  # seconds; the row of `waiting` only counts them


class Waiting(LiveRow):
    """The row, which makes way for notes."""

    has_bar = True

    @contextmanager
    def hidden_while_writing(self, stream: object) -> Iterator[None]:
        with self.aside():
            yield


@contextmanager
def waiting(what: str = LIBRARIES) -> Iterator[None]:
    """Inside, a terminal shows what is done and for how long; nothing is shown elsewhere, or below another row."""
    stream = underlying_console(sys.stderr)
    if active() is not None or not is_terminal(stream):
        yield
        return
    since = time.monotonic()
    row = Waiting(stream, lambda width: f"{what} … {time.monotonic() - since:.0f} s"[:width])
    set_active_bar(row)
    ticker = Every(COUNT_EVERY, row.draw)
    try:
        yield
    finally:
        set_active_bar(None)
        ticker.close()
        row.clear()
