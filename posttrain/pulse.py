"""How far the present work is: long loops anywhere report it here, and displays of a run read it.

`work(unit, total)` opens a stretch of work, `advance` counts inside it. A loop that runs inside another one of the same
unit counts into the outer one (the mini-batches of an update, the batches of a validation); one of another unit inside
it is not shown. Nothing here is needed to compute: without a reader the counts are thrown away.

A `Lane` notes when work beside the loop ran, such as that of reward workers, for the timeline of a run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Work:
    """Items done of those that are to be done, and the tokens in them."""

    unit: str
    total: int
    done: int = 0
    tokens: int = 0
    running_tokens: int = 0  # of items that are not done yet
    # Items' worth of what is under way and counted when it ends: half of a pass over 16 rows is 8.
    part: float = 0.0
    tokens_each: float = 0.0  # what an item is expected to hold; 0 where only items count
    most_tokens: int = 0  # what an item can hold at most
    started: float = field(default_factory=time.monotonic)

    def advance(self, items: int = 0, tokens: int = 0, running_tokens: int = 0) -> None:
        self.done += items
        self.tokens += tokens
        self.running_tokens = running_tokens
        self.part = 0.0

    def inside(self, part: float) -> None:
        """How far the items under way are; `advance` counts them when they are done."""
        self.part = part

    @property
    def shown(self) -> int:
        """Items done, with those under way as far as they are; all of them only at the end."""
        return max(self.done, min(int(self.done + self.part), self.total - 1))

    @property
    def all_tokens(self) -> int:
        return self.tokens + self.running_tokens

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def share(self) -> float:
        """How much is done, by tokens where their number can be guessed; never 1 before the end."""
        if not self.total:
            return 0.0
        items = (self.done + self.part) / self.total
        tokens = self.all_tokens / max(1.0, self._expected_tokens()) if self.tokens_each else 0.0
        return min(max(items, tokens), 0.99 if self.done < self.total else 1.0)

    def _expected_tokens(self) -> float:
        # Items that run longer than those of the work before are expected to grow by half, up to the limit.
        running = self.total - self.done
        each = max(self.tokens_each, 1.5 * self.running_tokens / max(1, running))
        return self.tokens + running * min(each, self.most_tokens or each)

    @property
    def seconds_left(self) -> float | None:
        """By the speed so far; None before anything is done."""
        return self.seconds * (1 / self.share - 1) if self.share > 0.02 else None


_now: Work | None = None
_usual: dict[str, float] = {}  # by unit: tokens of an item in the work before


def now() -> Work | None:
    """The work in progress, if any loop has said so."""
    return _now


@contextmanager
def work(unit: str, total: int, *, most_tokens: int = 0) -> Iterator[Work]:
    """A stretch of `total` items, each of at most `most_tokens` tokens (0: unknown)."""
    global _now
    outer = _now
    if outer is not None:
        yield outer if outer.unit == unit else Work(unit, total)
        return
    usual = _usual.get(unit, most_tokens)
    _now = own = Work(unit, total, tokens_each=min(usual, most_tokens), most_tokens=most_tokens)
    try:
        yield own
        if own.done:
            _usual[unit] = own.tokens / own.done
    finally:
        _now = None


NEIGHBOURS_S = 0.05  # spans with less than this between them are one
SHORTEST_S = 0.001


class Lane:
    """When at least one item of some work was under way, as [stage, begin, seconds, lane]. Any thread may write it."""

    def __init__(self, stage: str, name: str) -> None:
        self.stage, self.name = stage, name
        self._lock = threading.Lock()
        self._since: float | None = None
        self._spans: list[tuple[float, float]] = []

    def note(self, is_busy: bool) -> None:
        """From now on something is under way, or nothing is."""
        with self._lock:
            if is_busy and self._since is None:
                self._since = time.time()
            elif not is_busy and self._since is not None:
                self._end(self._since, time.time())
                self._since = None

    def _end(self, begun: float, ended: float) -> None:
        # Work comes in many short pieces: without joining neighbours a step would have thousands of them.
        if self._spans and begun - self._spans[-1][1] < NEIGHBOURS_S:
            begun = self._spans.pop()[0]
        self._spans.append((begun, ended))

    def take(self) -> list[list[Any]]:
        """The spans since the last call; what is still under way is cut here, and continues in the next call."""
        with self._lock:
            if self._since is not None:
                now = time.time()
                self._end(self._since, now)
                self._since = now
            taken, self._spans = self._spans, []
        return [
            [self.stage, round(begun, 4), round(ended - begun, 4), self.name]
            for begun, ended in taken
            if ended - begun >= SHORTEST_S
        ]
