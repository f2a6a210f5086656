"""What the kernel says of a process: whether it is stopped, and how much processor time it has used.

The kernel answers for a process whatever that is doing: a computation that holds the interpreter's lock for minutes
still uses processor time, and a stopped process is known as one. On systems without /proc nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STOPPED, TRACED = "T", "t"
"""By a signal (SIGSTOP, Ctrl-Z); by a debugger."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process of a machine. `started` (ticks after boot) tells it from a later one with its number, and from one of
    another container."""

    pid: int
    started: int


@dataclass(frozen=True)
class State:
    """`letter` as in /proc/PID/stat; `seconds` of processor time, with those of the processes below it."""

    letter: str
    seconds: float


def this_process() -> Process:
    """`started` is 0 where the kernel does not say it."""
    fields = _stat(os.getpid())
    return Process(os.getpid(), int(fields[19]) if fields else 0)


def state_of(process: Process) -> State | None:
    """None where it is gone, or where nothing is known of it."""
    fields = _stat(process.pid)
    if not fields or int(fields[19]) != process.started:
        return None
    used = sum(_ticks(pid) for pid in _with_those_below(process.pid))
    return State(fields[0], used / _TICKS)


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold anything: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) if fields else 0  # its own, and those of children that have ended


def _with_those_below(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = children.read_text().split()
        except OSError:  # that thread has ended
            continue
        for child in below:
            yield from _with_those_below(int(child))
