"""What a job's processes use, read from the host's /proc by the template."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PIPE = 16 * _PAGE
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


def memory_of(proc: int, processes: list[int], enough: int, open_files: int) -> int:
    """Bytes that the processes of a job hold together, and that their pipes and sockets can hold.

    Pages that they share count once, if it is worth looking closer.
    """
    buffers = buffers_of(proc, processes[1:], open_files)  # without the job's first process, which is ours
    resident = sum(_resident(proc, process) for process in processes)
    if resident + buffers > enough:
        resident = sum(_proportional(proc, process) for process in processes)
    return resident + buffers


@functools.cache
def socket_size() -> int:
    """Bytes that a socket may have on their way to its other end."""
    with socket.socketpair()[0] as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def buffers_of(proc: int, processes: list[int], open_files: int) -> int:
    """What the kernel may hold for the processes outside of any of them: a full socket shows in no process's size."""
    found: set[str] = set()
    hidden = 0
    for process in processes:
        for thread in threads(proc, str(process)):
            try:
                found |= _links(proc, f"{process}/task/{thread}/fd")
            except PermissionError:  # it made itself unreadable; what it hides counts in full
                hidden += open_files
            except OSError:  # it has ended
                continue
    sockets = hidden + sum(link.startswith("socket:") for link in found)
    return sockets * socket_size() + sum(link.startswith("pipe:") for link in found) * _PIPE


def _links(proc: int, name: str) -> set[str]:
    """Where the descriptors of a thread lead to; threads may have tables of their own."""
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
    found = set()
    try:
        for fd in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(fd, dir_fd=folder))
    finally:
        os.close(folder)
    return found


def address_space(proc: int) -> int:
    """Bytes of this process's address space."""
    return int(read_proc(proc, "self/statm").split()[0]) * _PAGE


def threads(proc: int, process: str) -> list[str]:
    """The threads of a process, by the host's numbers."""
    with contextlib.suppress(OSError):
        folder = os.open(f"{process}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)
    return []


def _children(proc: int, process: str) -> list[int]:
    found: list[int] = []
    for thread in threads(proc, process):
        found += map(int, read_proc(proc, f"{process}/task/{thread}/children").split())
    return found


def _resident(proc: int, process: int) -> int:
    fields = read_proc(proc, f"{process}/statm").split()
    return int(fields[1]) * _PAGE if fields else 0


def _proportional(proc: int, process: int) -> int:
    found = _PSS.search(read_proc(proc, f"{process}/smaps_rollup"))
    return int(found[1]) << 10 if found else _resident(proc, process)


def read_proc(proc: int, name: str) -> bytes:
    """A file of /proc, or nothing when its process has ended."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY, dir_fd=proc)
        try:
            return os.read(fd, 1 << 16)
        finally:
            os.close(fd)
    return b""
