"""What a job's processes use, read from the host's /proc by the template."""

from __future__ import annotations

import contextlib
import functools
import math
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


def measure_memory(proc: int, processes: list[int], enough: int, open_files: int) -> int:
    """Bytes that the processes of a job hold together, and that their pipes and sockets can hold.

    Pages that they share count once, if it is worth looking closer.
    """
    buffers = measure_buffers(proc, processes[1:], open_files)  # without the job's first process, which is ours
    resident = sum(_resident(proc, process) for process in processes)
    if resident + buffers > enough:
        resident = sum(_proportional(proc, process) for process in processes)
    return resident + buffers


@functools.cache
def socket_size() -> int:
    """Bytes that a socket may have on their way to its other end."""
    with socket.socketpair()[0] as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def measure_buffers(proc: int, processes: list[int], open_files: int) -> int:
    """What the kernel may hold for the processes outside of any of them: a full socket shows in no process's size."""
    found: set[str] = set()
    hidden = 0
    for process in processes:
        for thread in list_threads(proc, str(process)):
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


def list_threads(proc: int, process: str) -> list[str]:
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
    for thread in list_threads(proc, process):
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


_STEP = math.log(1.25)  # of a process's weight, from one nice level to the next
_NICEST = 19


def lower_priorities(proc: int, processes: list[int]) -> None:
    """Make the threads that run side by side so nice that together they weigh as one; their children inherit it."""
    tasks = [(process, thread) for process in processes for thread in list_threads(proc, str(process))]
    if len(tasks) < 2:
        return
    looks = [read_proc(proc, f"{process}/task/{thread}/stat").rpartition(b")")[2].split() for process, thread in tasks]
    running = sum(fields[:1] == [b"R"] for fields in looks)
    if running < 2:
        return
    level = min(_NICEST, math.ceil(math.log(running) / _STEP))
    for (process, thread), fields in zip(tasks, looks, strict=True):
        if fields and int(fields[16]) < level:
            # It may have ended, and its number be free, or be somebody's whose we are not: then nothing happens.
            with contextlib.suppress(OSError, IndexError):
                os.setpriority(
                    os.PRIO_PROCESS, _thread_numbers(proc, f"{process}/task/{thread}")[_namespace_depth(proc)], level
                )


@functools.cache
def _namespace_depth(proc: int) -> int:
    """Our place among the process namespaces: the host's numbers are not ours."""
    return len(_thread_numbers(proc, "self")) - 1


def _thread_numbers(proc: int, name: str) -> list[int]:
    """The numbers of a thread in all namespaces that it is in, the host's first; none when it has ended."""
    lines = read_proc(proc, f"{name}/status").splitlines()
    return [int(number) for line in lines if line.startswith(b"NSpid:") for number in line.split()[1:]]
