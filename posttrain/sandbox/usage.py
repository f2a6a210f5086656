"""What a job's processes use, read by the template from the host's /proc; and their share of the processors.

The kernel divides processors among runnable threads, so a job of 16 spinning processes would leave a neighbour only a
seventeenth. Two things reduce its share to about that of one process: a job stays one session, by which many kernels
group threads (autogroup); elsewhere, threads that run at the same time get a lower priority.
"""

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


def descendants(proc: int) -> list[int]:
    """List the processes below this one, parents before their children, by the host's numbers."""
    found: list[int] = []
    todo = ["self"]
    while todo:
        children = _children(proc, todo.pop())
        found += children
        todo += map(str, children)
    return found


def measure_memory(proc: int, processes: list[int], enough: int, open_files: int) -> int:
    """Bytes that a job's processes hold together, with what their pipes and sockets can hold."""
    buffers = measure_buffers(proc, processes[1:], open_files)  # without the job's first process, which is ours
    resident = sum(_resident(proc, process) for process in processes)
    if resident + buffers > enough:
        resident = sum(_proportional(proc, process) for process in processes)
    return resident + buffers


@functools.cache
def socket_size() -> int:
    """Bytes that a socket can hold in transit."""
    with socket.socketpair()[0] as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def measure_buffers(proc: int, processes: list[int], open_files: int) -> int:
    # The kernel can hold data outside of every process: a full socket shows in no process's size.
    found: set[str] = set()
    hidden = 0
    for process in processes:
        for thread in list_threads(proc, str(process)):
            try:
                found |= _links(proc, f"{process}/task/{thread}/fd")
            except PermissionError:  # it made itself unreadable, so it counts as if all its descriptors were sockets
                hidden += open_files
            except OSError:  # it has ended
                continue
    sockets = hidden + sum(link.startswith("socket:") for link in found)
    return sockets * socket_size() + sum(link.startswith("pipe:") for link in found) * _PIPE


def _links(proc: int, name: str) -> set[str]:
    # Asked per thread, because a thread may have a descriptor table of its own.
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
    return int(read_proc(proc, "self/statm").split()[0]) * _PAGE


def list_threads(proc: int, process: str) -> list[str]:
    """List the threads of a process, by the host's numbers."""
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
    """Read a file of /proc; empty if its process has ended."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_RDONLY, dir_fd=proc)
        try:
            return os.read(fd, 1 << 16)
        finally:
            os.close(fd)
    return b""


_STEP = math.log(1.25)  # ratio of a thread's weight from one nice level to the next
_NICEST = 19


def lower_priorities(proc: int, processes: list[int]) -> None:
    """Lower the priority of threads that run at the same time until together they weigh as one; children inherit it."""
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
            # The thread may have ended, and its number may be free or belong to another user: both are harmless.
            with contextlib.suppress(OSError, IndexError):
                os.setpriority(
                    os.PRIO_PROCESS, _thread_numbers(proc, f"{process}/task/{thread}")[_namespace_depth(proc)], level
                )


@functools.cache
def _namespace_depth(proc: int) -> int:
    # How many process namespaces we are in, because the host's thread numbers are not ours.
    return len(_thread_numbers(proc, "self")) - 1


def _thread_numbers(proc: int, name: str) -> list[int]:
    # The numbers of a thread in all namespaces that it is in, the host's first; none if it has ended.
    lines = read_proc(proc, f"{name}/status").splitlines()
    return [int(number) for line in lines if line.startswith(b"NSpid:") for number in line.split()[1:]]
