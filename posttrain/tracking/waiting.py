"""A row that moves while a command does something that takes seconds and says nothing by itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.tracking.colour import is_terminal
from posttrain.tracking.every import Every
from posttrain.tracking.live import LiveRow
from posttrain.tracking.tee import active, console_of, set_active

LIBRARIES = "reading torch and transformers"
DRAW_EVERY = 0.5


class Waiting(LiveRow):
    """The row, which makes way for notes."""

    has_bar = True

    @contextmanager
    def moved_away(self, stream: object) -> Iterator[None]:
        with self.aside():
            yield


@contextmanager
def waiting(what: str = LIBRARIES) -> Iterator[None]:
    """Inside, a terminal shows what is done and for how long; nothing is shown elsewhere, or below another row."""
    stream = console_of(sys.stderr)
    if active() is not None or not is_terminal(stream):
        yield
        return
    since = time.monotonic()
    row = Waiting(stream, lambda width: f"{what} … {time.monotonic() - since:.0f} s"[:width])
    set_active(row)
    ticker = Every(DRAW_EVERY, row.draw)
    try:
        yield
    finally:
        set_active(None)
        ticker.close()
        row.clear()
