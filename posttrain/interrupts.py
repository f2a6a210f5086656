"""Repeated Ctrl-C: the first one ends a program, and further ones are ignored while it cleans up.

Otherwise each of them would interrupt the cleanup after the one before, and the last would show a traceback.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 5.0  # seconds of cleanup after which another Ctrl-C ends the process at once

_since: float | None = None
_programs = 0  # how many one_interrupt() are open: above zero the process ends with what it runs


@contextmanager
def one_interrupt() -> Iterator[None]:
    """Around a whole program: the first Ctrl-C raises KeyboardInterrupt, others are ignored for GRACE_S."""
    global _programs
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    mine = default and threading.current_thread() is threading.main_thread()
    if mine:
        signal.signal(signal.SIGINT, _handle)
    _programs += 1
    try:
        yield
    finally:
        _programs -= 1
        if mine:  # after a Ctrl-C, Python's own cleanup at exit must not be interrupted either
            signal.signal(signal.SIGINT, signal.default_int_handler if _since is None else signal.SIG_IGN)


def interrupted() -> bool:
    """Whether a Ctrl-C is ending the process. Errors that follow are its result: some libraries turn it into others."""
    return _since is not None


def leaving() -> None:
    """Note that a Ctrl-C ends the process."""
    global _since
    _since = time.monotonic()


def left() -> None:
    """Note that the run has ended. Inside `one_interrupt` the program still ends; a caller in Python continues."""
    global _since
    if not _programs:
        _since = None


def once_more() -> None:
    """Handle another Ctrl-C while the process ends: ignored, unless that takes longer than GRACE_S."""
    if _since is not None and time.monotonic() - _since > GRACE_S:
        os._exit(130)


def _handle(number: int, frame: FrameType | None) -> None:
    if _since is not None:
        once_more()
        return
    leaving()
    raise KeyboardInterrupt
