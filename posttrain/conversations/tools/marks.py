"""Which conversations run code at this moment: a table that a worker process shares with its parent.

A process that blocks or ends cannot say which of its conversations did it. The table still can: a worker marks a
conversation before each step of its code and clears the mark behind it, which costs no message.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

_PLACES = 1 << 20  # of conversations that are under way together; only pages that are written take memory


class Marks:
    """Of one worker process, made in its parent before it is forked."""

    def __init__(self) -> None:
        self._table = mmap.mmap(-1, 2 * _PLACES)

    def of(self, number: int) -> Mark:
        """The mark of a conversation."""
        return Mark(self._table, 2 * place_of(number))

    def places(self) -> list[int]:
        """The places (`place_of`) of all conversations that are marked."""
        found, clean = set[int](), bytes(mmap.PAGESIZE)
        for start in range(0, 2 * _PLACES, mmap.PAGESIZE):
            page = self._table[start : start + mmap.PAGESIZE]
            if page != clean:
                found.update((start + number) // 2 for number, is_set in enumerate(page) if is_set)
        return sorted(found)


def place_of(number: int) -> int:
    """The place of a conversation in a table."""
    return number % _PLACES


class Mark:
    """Of one conversation: one byte for the steps of its event loop, one for its threads."""

    total_seconds = 0.0

    def __init__(self, table: mmap.mmap, place: int) -> None:
        self._table, self._place = table, place
        self.seconds = 0.0
        """What the steps of this conversation have taken, in this process."""

    def add_seconds(self, seconds: float) -> None:
        self.seconds += seconds
        Mark.total_seconds += seconds

    @property
    def seconds_of_others(self) -> float:
        """What the steps of all other conversations have taken, in this process."""
        return Mark.total_seconds - self.seconds

    def set_step(self, running: bool) -> None:
        self._table[self._place] = running

    def set_thread(self, running: bool) -> None:
        self._table[self._place + 1] = running


CURRENT: ContextVar[Mark | None] = ContextVar("CURRENT", default=None)
"""The mark of the conversation whose code runs, in a worker process of agents."""


class MarkedSteps(Coroutine[Any, Any, Any]):
    """A coroutine of a conversation, which is marked while it runs and not while it waits."""

    def __init__(self, inner: Any, mark: Mark) -> None:
        self._inner, self._mark = inner, mark

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def _step(self, step: Callable[..., Any], *given: Any) -> Any:
        start, mark = time.monotonic(), self._mark
        mark.set_step(True)
        try:
            return step(*given)
        finally:
            mark.set_step(False)
            mark.add_seconds(time.monotonic() - start)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return (yield from self._inner.__await__())
