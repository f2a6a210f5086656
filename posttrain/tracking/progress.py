"""What a run shows: a live row with its progress, one line per step, and notes.

    step 4/20 ━━━━────────────  15%  reward 0.459  rollout 12/64 responses, 3,210 tokens, 640 tok/s, 0:35 left

The row is at the bottom of a terminal. What does not fit is left out, least important first, so that it never wraps.
`LiveRow` draws it, and `waiting()` shows one while a command does something that takes seconds, such as loading
libraries. `say` prints a message from anywhere in posttrain: above the row if there is one, otherwise as a plain line.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from posttrain import pulse
from posttrain.tracking.console import add_colours, columns, fold_lines, has_colour, is_terminal, styled
from posttrain.tracking.tee import Tee, active, set_active_bar, underlying_console

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
    work: pulse.Work | None = None

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
    """Calls `act` every `seconds` in a daemon thread."""

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
        # `act` itself may close it, and a thread cannot join itself.
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
        """Inside, the row is off the screen, so that lines can be written."""
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
    """A live row that is cleared while notes are printed."""

    has_bar = True

    @contextmanager
    def hidden_while_writing(self, stream: object) -> Iterator[None]:
        with self.aside():
            yield


@contextmanager
def waiting(what: str = LIBRARIES) -> Iterator[None]:
    """Inside, a terminal shows what is being done and for how long, unless there is another row."""
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


ADVICE_EVERY = 10  # the same advice is printed again after this many steps
LINE_COLUMNS = 100
# Without a terminal, a stage logs its progress every so many seconds.
LOG_EVERY = 60.0


def say(text: str) -> None:
    """Print a message above the live row; a tee also writes it to the log."""
    bar, stream = active(), underlying_console(sys.stdout)
    shown = fold_lines(text, columns(stream)) if is_terminal(stream) else text
    shown = add_colours(shown) if has_colour(stream) else shown
    if isinstance(sys.stdout, Tee):  # it moves the bar itself
        sys.stdout.say(text, shown)
    elif bar is None or not bar.has_bar:
        print(shown, flush=True)
    else:
        with bar.hidden_while_writing(sys.stdout):
            print(shown, flush=True)


def console_width() -> int:
    """Columns for a table: those of the terminal, at most LINE_COLUMNS, which is also what logs get."""
    stream = underlying_console(sys.stdout)
    return min(LINE_COLUMNS, columns(stream)) if is_terminal(stream) else LINE_COLUMNS


class Progress:
    """A live row over the steps of a run on a terminal; elsewhere, one line per step."""

    def __init__(self, total: int, *, done: int = 0, stream: TextIO | None = None, label: str = "step") -> None:
        self._stream = stream or underlying_console(sys.stderr)
        self._total, self._done, self._label = total, done, label
        self._first, self._started = done, time.monotonic()
        self._stage: str | None = None
        self._step_since = self._stage_since = self._logged_at = self._started
        self._number = ""
        self._row: LiveRow | None = None
        self._ticker: Every | None = None
        self._advised: dict[str, int] = {}

    @property
    def room(self) -> int:
        """Columns that a step's line may have so that it fits one row of the terminal, or of LINE_COLUMNS."""
        return console_width() - len(f"step {self._total}/{self._total}: ")

    @property
    def has_bar(self) -> bool:
        return self._row is not None

    def __enter__(self) -> Progress:
        if is_terminal(self._stream) and not _is_pipe(underlying_console(sys.stdout)):
            colour = has_colour(self._stream)
            self._row = LiveRow(self._stream, lambda width: progress_row(self.moment(), width, colour=colour))
            self._row.draw()
            self._ticker = Every(DRAW_EVERY, self._row.draw)
        else:
            self._ticker = Every(1.0, self._log_if_long)
        set_active_bar(self)
        return self

    def __exit__(self, *exc: object) -> None:
        set_active_bar(None)
        if self._ticker is not None:
            self._ticker.close()
        if self._row is not None:
            self._row.clear()
        self._row = self._ticker = None

    @contextmanager
    def hidden_while_writing(self, stream: TextIO) -> Iterator[None]:
        """Take the row off the screen while `stream` is written to."""
        assert self._row is not None
        with self._row.aside():
            yield
            with suppress(OSError, ValueError):
                stream.flush()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, the row names this stage; the outer one is named again afterwards."""
        # Stages nest: the outer one is shown and timed on from where it began.
        before = self._stage, self._stage_since
        self._stage, self._stage_since = name, time.monotonic()
        try:
            yield
        finally:
            self._stage, self._stage_since = before

    def moment(self) -> Moment:
        now = time.monotonic()
        # Only steps of this start count for the estimate: those before a resume may have run on another machine.
        made = self._done - self._first
        left = None
        if made and self._done < self._total:
            each = (self._step_since - self._started) / made
            # From whole steps, less what has passed of this one, so that the time counts down between steps.
            left = max(0.0, each * (self._total - self._done) - (now - self._step_since))
        return Moment(
            step=min(self._done + 1, self._total),
            total=self._total,
            done=self._done,
            label=self._label,
            number=self._number,
            stage=self._stage,
            stage_seconds=now - self._stage_since,
            step_seconds=now - self._step_since,
            seconds_left=left,
            work=pulse.now(),
        )

    def step(
        self,
        line: str,
        advice: Sequence[str] = (),
        *,
        reward: float | None = None,
        loss: float | None = None,
        quiet: bool = False,
    ) -> None:
        """One step is done: print its line and its advice (unless `quiet`), and show reward or loss next to the bar."""
        self._done += 1
        self._step_since = self._logged_at = time.monotonic()
        for name, value in (("reward", reward), ("loss", loss)):
            if value is not None:
                self._number = f"{name} {value:.3f}"
        if not quiet:
            say(f"step {self._done}/{self._total}: {line}")
        for sentence in advice:
            if not quiet and self._is_news(sentence):
                say(f"  ! {sentence}")

    def _log_if_long(self) -> None:
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            moment = self.moment()
            say(f"  ... {moment.label} {moment.step}/{moment.total}: {moment.sentence()}")

    def _is_news(self, sentence: str) -> bool:
        # Sentences that differ only in numbers, or in the error after a colon, are the same advice.
        kind = re.sub(r"[\d.,]+", "#", sentence.partition(": ")[0])
        if self._done - self._advised.get(kind, -ADVICE_EVERY) < ADVICE_EVERY:
            return False
        self._advised[kind] = self._done
        return True


def _is_pipe(stream: TextIO) -> bool:
    # Another program reads this stream. If it prints to the same terminal (`| tee`), it would tear the row.
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return False
