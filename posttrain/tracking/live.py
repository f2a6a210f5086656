"""LiveRow: one row at the bottom of a terminal, drawn again and again, that steps aside for whole lines."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

CLEAR = "\r\x1b[K"
DRAW_EVERY = 0.2


class LiveRow:
    """Draws `text(width)` on `stream`; a terminal that went away is left alone."""

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


def columns(stream: TextIO) -> int:
    """The width of the terminal now: it may be resized at any time."""
    try:
        return max(20, os.get_terminal_size(stream.fileno()).columns or 80)
    except (OSError, ValueError, AttributeError):  # closed, or no stream at all
        return 80
