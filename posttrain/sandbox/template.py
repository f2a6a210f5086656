"""The template: a warm Python in its own namespaces that forks one job at a time and watches its use of resources.

It is the first process of its process namespace: when it ends, the kernel ends everything in it. Each job is forked
into another process namespace, so that it can neither see nor signal the template or an earlier job.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import select
import signal
import site
import socket
import time
from typing import Any

from posttrain.sandbox import job, kernel, wire
from posttrain.sandbox.seccomp import assemble
from posttrain.sandbox.usage import descendants, lower_priorities, measure_memory

_MB = 1 << 20
_TICK_MS = 25
# A job ends itself at its deadline and reports what it had; after this much longer it is killed.
_GRACE_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36


def serve(control: int, proc: int, *, isolated: bool) -> None:
    """Run jobs until the other side closes the connection. `proc` is the host's /proc, which no job can see."""
    connection = socket.socket(fileno=control)
    own = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc)
    if not isolated:
        kernel.prctl(_PR_SET_CHILD_SUBREAPER, 1, "subreaper")  # so that processes which a job leaves behind are found
    with contextlib.suppress(OSError), os.fdopen(_open(proc, "self/oom_score_adj", os.O_WRONLY), "w") as file:
        file.write("1000")  # if the machine runs out of memory, jobs are killed first
    site.setquit()  # `exit` and `quit`, which Python lacks without its site module
    site.sethelper()
    if isolated:
        assemble(platform.machine())
    gc.collect()
    gc.freeze()  # otherwise the collector would write to, and so copy, every page that jobs share with us
    wire.send(control, {"ready": True})
    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1, 1)
        if not data:
            return
        limits = wire.receive(control)
        try:
            pid = _fork_job(fds[0], limits, proc, own, isolated)
        except OSError as error:
            wire.send(control, {"refused": getattr(error, "step", "fork of a job"), "errno": error.errno})
            continue
        finally:
            os.close(fds[0])
        wire.send(control, _watch(pid, limits, proc, isolated))


def _fork_job(channel: int, limits: dict[str, Any], proc: int, own: int, isolated: bool) -> int:
    if isolated:
        kernel.unshare(kernel.NEWPID, "process namespace of a job")
    try:
        pid = os.fork()
        if pid == 0:
            try:
                job.main(channel, limits, proc, isolated=isolated)
            finally:
                os._exit(70)
        return pid
    finally:
        if isolated:
            kernel.setns(own, kernel.NEWPID)  # the next job gets another one


def _watch(pid: int, limits: dict[str, Any], proc: int, isolated: bool) -> dict[str, Any]:
    # Some limits can only be enforced from outside: memory of all processes together, and their number for root.
    reason, most, end = None, 0, time.monotonic() + limits["seconds"] + _GRACE_S
    poll = select.poll()
    fd = os.pidfd_open(pid)
    poll.register(fd, select.POLLIN)
    while not poll.poll(_TICK_MS):
        if time.monotonic() > end:
            reason = reason or "timeout"
            os.kill(pid, signal.SIGKILL)
            continue
        processes = descendants(proc)
        lower_priorities(proc, processes[1:])
        excess, held = _find_excess(proc, processes, limits)
        most = max(most, held)
        if excess:
            # The job's first process survives the first time, to report what the program had written.
            for process in descendants(proc)[0 if reason else 1 :]:
                _kill(proc, process)
            reason = excess
    os.close(fd)
    _, status, used = os.wait4(pid, 0)
    while not isolated and (left := descendants(proc)):
        for process in left:
            _kill(proc, process)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
    return {
        "reason": reason,
        "exit_code": os.waitstatus_to_exitcode(status),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 4),
        "memory_mb": round(max(used.ru_maxrss / 1024, most / _MB), 1),
    }


def _find_excess(proc: int, processes: list[int], limits: dict[str, Any]) -> tuple[str | None, int]:
    enough = limits["memory_mb"] * _MB
    held = measure_memory(proc, processes, enough, limits["open_files"])
    if len(processes) > limits["processes"] + 1:
        return "processes", held  # needed where the kernel's own limit does not bind, as for root
    return "memory" if held > enough else None, held


def _kill(proc: int, process: int) -> None:
    # By its folder in /proc: the template has another process numbering than the host's /proc.
    with contextlib.suppress(OSError):
        folder = _open(proc, str(process), os.O_RDONLY | os.O_DIRECTORY)
        try:
            signal.pidfd_send_signal(folder, signal.SIGKILL)
        finally:
            os.close(folder)


def _open(proc: int, name: str, flags: int) -> int:
    return os.open(name, flags, dir_fd=proc)
