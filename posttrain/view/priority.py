"""Background work pauses while a request waits for its answer: Python computes in one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

# A pause is no longer: a page that asks without end must not keep samples from being read.
LONGEST_S = 0.5

_lock, _asked = threading.Lock(), 0


@contextmanager
def answering(change: int = 1) -> Iterator[None]:
    """Around an answer."""
    global _asked
    with _lock:
        _asked += change
    try:
        yield
    finally:
        with _lock:
            _asked -= change


def waiting_for_it() -> AbstractContextManager[None]:
    """Inside an answer that waits for the work in the background itself."""
    return answering(-1)


def give_way() -> None:
    """Between two pieces of work: wait until no answer is being made."""
    until = time.monotonic() + LONGEST_S
    while _asked > 0 and time.monotonic() < until:
        time.sleep(0.002)
