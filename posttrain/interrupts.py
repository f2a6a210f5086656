"""Ctrl-C pressed again and again: the first one ends a program, and those that follow while it ends are the same one.

Without this each further one would interrupt the tidying up after the one before, and the last would show a traceback.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 5.0  # seconds of tidying up after which a further Ctrl-C ends the process where it stands

_since: float | None = None
_programs = 0  # how many one_interrupt() are open: above zero the process ends with what it runs


@contextmanager
def one_interrupt() -> Iterator[None]:
    """For a whole program: the first Ctrl-C raises KeyboardInterrupt, further ones do not until GRACE_S have passed."""
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
        if mine:  # after a Ctrl-C the last moments of the process must not be interrupted either
            signal.signal(signal.SIGINT, signal.default_int_handler if _since is None else signal.SIG_IGN)


def interrupted() -> bool:
    """Whether a Ctrl-C was heeded; errors that follow come of it, as some libraries make others of one in an import."""
    return _since is not None


def leaving() -> None:
    """A Ctrl-C was heeded: the process is ending."""
    global _since
    _since = time.monotonic()


def left() -> None:
    """What was ending has ended. A program goes on leaving; a caller in Python goes on living."""
    global _since
    if not _programs:
        _since = None


def once_more() -> None:
    """Another one while the process is ending: ignored, unless it takes too long."""
    if _since is not None and time.monotonic() - _since > GRACE_S:
        os._exit(130)


def _handle(number: int, frame: FrameType | None) -> None:
    if _since is not None:
        once_more()
        return
    leaving()
    raise KeyboardInterrupt
