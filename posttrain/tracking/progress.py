"""What a run shows: a live row with its progress, one line per step, and notes.

`say` prints a message from anywhere in posttrain: above the row if there is one, otherwise as a plain line.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from posttrain import pulse
from posttrain.tracking.row import DRAW_EVERY, Every, LiveRow, Moment, progress_row
from posttrain.tracking.tee import Tee, active, set_active_bar, underlying_console
from posttrain.tracking.terminal_text import add_colours, columns, fold_lines, has_colour, is_terminal

ADVICE_EVERY = 10  # the same advice is printed again after this many steps
LINE_COLUMNS = 100
# Without a terminal, a stage that takes longer than this logs its progress, this often.
WORD_EVERY = 60.0


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
        if is_terminal(self._stream) and not _is_pipe(underlying_console(sys.stdout)):
            colour = has_colour(self._stream)
            self._row = LiveRow(self._stream, lambda width: progress_row(self.moment(), width, colour=colour))
            self._row.draw()
            self._ticker = Every(DRAW_EVERY, self._row.draw)
        else:
            self._ticker = Every(1.0, self._speak_if_long)
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
