"""What a job's processes use, read from the host's /proc by the template."""

from __future__ import annotations

import contextlib
import os
import re

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.M)


def descendants(proc: int, root: str = "self") -> list[int]:
    """The processes below this one, parents before their children, by the host's numbers."""
    found: list[int] = []
    todo = [root]
    while todo:
        children = _children(proc, todo.pop())
        found += children
        todo += map(str, children)
    return found


def memory_of(proc: int, processes: list[int], enough: int) -> int:
    """Bytes that the processes hold together; pages that they share count once, if it is worth looking closer."""
    resident = sum(_resident(proc, process) for process in processes)
    return resident if resident <= enough else sum(_proportional(proc, process) for process in processes)


def address_space(proc: int) -> int:
    """Bytes of this process's address space."""
    return int(_read(proc, "self/statm").split()[0]) * _PAGE


def _children(proc: int, process: str) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        folder = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            threads = os.listdir(folder)
        finally:
            os.close(folder)
        for thread in threads:
            found += map(int, _read(proc, f"{process}/task/{thread}/children").split())
    return found


def _resident(proc: int, process: int) -> int:
    fields = _read(proc, f"{process}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(proc: int, process: int) -> int:
    found = _PSS.search(_read(proc, f"{process}/smaps_rollup"))
    return int(found[1]) << 10 if found else _resident(proc, process)


def _read(proc: int, name: str) -> bytes:
    """A file of /proc, or nothing when its process has ended."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY, dir_fd=proc)
        try:
            return os.read(fd, 1 << 16)
        finally:
            os.close(fd)
    return b""
