"""What a run shows: a live row with its progress, one line per step, and notes; all lines also go into the log file.

`say` is how posttrain speaks to its user anywhere: above the row where there is one, as a plain line elsewhere.
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
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from posttrain import pulse
from posttrain.tracking.colour import has_colour, is_terminal, painted, plain
from posttrain.tracking.console import as_console
from posttrain.tracking.every import Every
from posttrain.tracking.folding import folded
from posttrain.tracking.foreign import libraries_apart
from posttrain.tracking.live import DRAW_EVERY, LiveRow, columns
from posttrain.tracking.row import Moment, progress_row

ADVICE_EVERY = 10
"""The same advice is printed again after this many steps."""
LINE_COLUMNS = 100
WORD_EVERY = 60.0
"""Without a terminal a stage that takes longer than this says how far it is, this often."""

_active: Progress | None = None


def say(text: str) -> None:
    """Print one note, without tearing the live row apart; a running tee writes it to the log too."""
    bar, stream = _active, _console(sys.stdout)
    shown = folded(text, columns(stream)) if is_terminal(stream) else text
    shown = painted(shown) if has_colour(stream) else shown
    if isinstance(sys.stdout, Tee):  # it moves the bar itself
        sys.stdout.say(text, shown)
    elif bar is None or not bar.has_bar:
        print(shown, flush=True)
    else:
        with bar.moved_away(sys.stdout):
            print(shown, flush=True)


def console_width(most: int = LINE_COLUMNS) -> int:
    """Columns for a table: those of the terminal, at most `most`, which is also what logs get."""
    stream = _console(sys.stdout)
    return min(most, columns(stream)) if is_terminal(stream) else most


class Tee:
    """A stand-in for `sys.stdout` or `sys.stderr` that writes to it and to a log file."""

    def __init__(self, stream: Any, log: TextIO, lock: threading.RLock) -> None:
        self.stream, self._log, self._lock = stream, log, lock
        self._pending, self._lost, self._log_failed = "", "", False
        self._hid_bar = False

    def write(self, text: str) -> int:
        self._write(text, text)
        return len(text)

    def say(self, text: str, shown: str) -> None:
        """A note: `text` goes into the log, `shown` to the console."""
        self._write(f"{text}\n", f"{shown}\n")
        self.flush()

    def _write(self, text: str, shown: str) -> None:
        with self._lock:
            self._to_log(lambda: self._log.write(_for_log(text)))
            if not self._hides(text):
                self._show(shown)
            if self._lost and text.endswith("\n"):
                self._log_loss()

    def _hides(self, text: str) -> bool:
        """Whether this is a bar that another program's code draws where there is a row already, or nobody to look."""
        if text == "\n" and self._hid_bar:  # the bar's end
            self._hid_bar = False
            return True
        row = _active is not None and _active.has_bar
        self._hid_bar = _is_bar(text) and (row or not is_terminal(self.stream))
        return self._hid_bar

    def _to_log(self, action: Callable[[], object]) -> None:
        # A log on a full disk must not end the run; what is printed is still shown.
        try:
            action()
        except ValueError:  # closed: a handler of a library outlives the run
            return
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                self.stream.write(f"The log file could not be written: {error}.\n")

    def _show(self, text: str) -> None:
        bar = _active
        if bar is None or not bar.has_bar:
            self.stream.write(text)
            return
        # `print` hands over the text and its line end one after the other; the bar is moved once per whole line.
        self._pending += text
        if "\n" in self._pending:
            lines, _, self._pending = self._pending.rpartition("\n")
            with bar.moved_away(self.stream):
                self.stream.write(lines + "\n")

    def lost_console(self, other: TextIO, path: Path, text: str) -> None:
        """Says so where it can still be read: in the log, and on the other stream."""
        self._lost = text  # into the log after the line that is being written
        other.write(f"{text} Its log: {path}\n")

    def _log_loss(self) -> None:
        text, self._lost = self._lost, ""
        self._to_log(lambda: self._log.write(f"{text}\n"))

    def flush(self) -> None:
        with self._lock:
            self._to_log(self._log.flush)
            self.stream.flush()

    def finish(self) -> None:
        with self._lock:
            self.stream.write(self._pending)
            self._pending = ""
            if self._lost:
                self._log_loss()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # isatty, encoding, fileno, ...


@contextmanager
def tee_output(path: Path) -> Iterator[None]:
    """Everything printed in this process, also by user code, goes to the console and is added to the file `path`; what
    libraries say (warnings, loggers) goes to a file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.RLock()
    log = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    before = sys.stdout, sys.stderr
    consoles: list[Any] = [as_console(stream) for stream in before]
    tees = Tee(consoles[0], log, lock), Tee(consoles[1], log, lock)
    for tee, other in zip(tees, reversed(consoles), strict=True):
        tee.stream.on_lost = partial(tee.lost_console, other, path)
        if tee.stream.why:  # it was lost before there was a log
            tee.stream.on_lost(tee.stream.why)
    sys.stdout, sys.stderr = tees
    try:
        with libraries_apart(path.parent, (*before, *consoles, *tees)):
            yield
    finally:
        # Only what is still ours is put back: someone else may have replaced the streams meanwhile.
        if sys.stdout is tees[0]:
            sys.stdout = before[0]
        if sys.stderr is tees[1]:
            sys.stderr = before[1]
        for tee in tees:
            tee.finish()
        with suppress(OSError):  # what a full disk did not take was said when it was written
            log.close()


class Progress:
    """A live row over the steps of a run on a terminal; elsewhere, one line per step."""

    def __init__(self, total: int, *, done: int = 0, stream: TextIO | None = None, label: str = "step") -> None:
        self._stream = stream or _console(sys.stderr)
        self._total, self._done, self._label = total, done, label
        self._first, self._started = done, time.monotonic()
        self._stage: str | None = None
        self._step_since = self._stage_since = self._spoke = self._started
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
        global _active
        if is_terminal(self._stream) and not _is_pipe(_console(sys.stdout)):
            colour = has_colour(self._stream)
            self._row = LiveRow(self._stream, lambda width: progress_row(self.moment(), width, colour=colour))
            self._row.draw()
            self._ticker = Every(DRAW_EVERY, self._row.draw)
        else:
            self._ticker = Every(1.0, self._speak_if_long)
        _active = self
        return self

    def __exit__(self, *exc: object) -> None:
        global _active
        _active = None
        if self._ticker is not None:
            self._ticker.close()
        if self._row is not None:
            self._row.clear()
        self._row = self._ticker = None

    @contextmanager
    def moved_away(self, stream: TextIO) -> Iterator[None]:
        """Take the row off the screen while `stream` is written to."""
        assert self._row is not None
        with self._row.aside():
            yield
            with suppress(OSError, ValueError):
                stream.flush()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, the row names this stage; the outer one is named again afterwards."""
        before = self._stage, self._stage_since
        self._stage, self._stage_since = name, time.monotonic()
        try:
            yield
        finally:
            self._stage, self._stage_since = before

    def moment(self) -> Moment:
        """Where the run stands now."""
        now = time.monotonic()
        made = self._done - self._first
        left = None
        if made and self._done < self._total:
            each = (self._step_since - self._started) / made
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
        """One step is done: print its line and its advice (unless `quiet`), reward or loss go beside the bar."""
        self._done += 1
        self._step_since = self._spoke = time.monotonic()
        for name, value in (("reward", reward), ("loss", loss)):
            if value is not None:
                self._number = f"{name} {value:.3f}"
        if not quiet:
            say(f"step {self._done}/{self._total}: {line}")
        for sentence in advice:
            if not quiet and self._is_news(sentence):
                say(f"  ! {sentence}")

    def _speak_if_long(self) -> None:
        now = time.monotonic()
        if now - self._spoke >= WORD_EVERY:
            self._spoke = now
            moment = self.moment()
            say(f"  ... {moment.label} {moment.step}/{moment.total}: {moment.sentence()}")

    def _is_news(self, sentence: str) -> bool:
        kind = re.sub(r"[\d.,]+", "#", sentence)  # the same sentence with other numbers is the same advice
        if self._done - self._advised.get(kind, -ADVICE_EVERY) < ADVICE_EVERY:
            return False
        self._advised[kind] = self._done
        return True


def _is_pipe(stream: TextIO) -> bool:
    """Whether another program reads this stream: if it shows it on the same terminal, a row would be torn."""
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return False


def _for_log(text: str) -> str:
    """Without colours, and without what a bar draws over again and again."""
    return "" if _is_bar(text) else plain(text)


def _is_bar(text: str) -> bool:
    return "\r" in text and not text.endswith("\n")


def _console(stream: TextIO) -> TextIO:
    """The stream below a tee: a row that is drawn again and again has no place in a log."""
    return stream.stream if isinstance(stream, Tee) else stream
