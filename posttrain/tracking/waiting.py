"""LiveRow, one row at the bottom of a terminal; `waiting()` shows one while a command does something that takes
seconds, such as loading libraries."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from posttrain.tracking.background import Every
from posttrain.tracking.tee import active, set_active_bar, underlying_console
from posttrain.tracking.terminal_text import columns, is_terminal

CLEAR = "\r\x1b[K"
DRAW_EVERY = 0.2  # seconds, of a run's progress


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
