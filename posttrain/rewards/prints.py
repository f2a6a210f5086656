"""What rewards print, held to what a console and a log can bear: a thousand responses a step may print a line each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SHOWN_LINES, SHOWN_S = 40, 10.0
"""So many lines are shown in so many seconds."""
CUT = f"... more than {SHOWN_LINES} lines of the reward in {SHOWN_S:.0f} s; `posttrain reward try` shows all"


class Prints:
    """Hands lines on to `say`; beyond the limit one line tells that others were left out."""

    def __init__(self, say: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since, self._lines = clock(), 0

    def __call__(self, line: str) -> None:
        now = self._clock()
        if now - self._since >= SHOWN_S:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines <= SHOWN_LINES:
            self._say(line)
        elif self._lines == SHOWN_LINES + 1:
            self._say(CUT)
