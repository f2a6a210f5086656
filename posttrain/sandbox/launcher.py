"""The first process of a sandbox, and the template that it forks, which runs the jobs.

`sandbox.SandboxProcess` starts the launcher as a bare Python with an empty environment, and sends the configuration as
one message. It enters the outer namespaces, starts the template in them, and ends with either. The file system there
is a small read-only root with what Python needs, and /box, which each job owns. Of the host it shows only the
interpreter, its libraries, the system's programs and four devices: no home, no checkout, no run outputs, no /proc and
no /sys.

The template is a warm Python that forks one job at a time and watches its use of resources. It is the first process of
its process namespace: when it ends, the kernel ends everything in it. Each job is forked into another process
namespace, so that it can neither see nor signal the template or an earlier job.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import platform
import select
import signal
import site
import socket
import stat
import sys
import time
from typing import Any

from posttrain.sandbox import job, kernel, wire
from posttrain.sandbox.job import BOX, TMP, WORK
from posttrain.sandbox.usage import descendants, lower_priorities, measure_memory

_NOBODY = 65534
_USERS = "user namespace"
_NAMESPACES = {
    "network namespace": kernel.NEWNET,
    "IPC namespace": kernel.NEWIPC,
    "UTS namespace": kernel.NEWUTS,
    "process namespace": kernel.NEWPID,
    "mount namespace": kernel.NEWNS,
}


def main(control: int, parent: int) -> None:
    """Serve the process `parent` over the socket `control` until it ends."""
    parent_fd = os.pidfd_open(os.getppid())
    if os.getppid() != parent:  # the caller ended before we looked
        os._exit(0)
    config = wire.receive(control)
    sys.path[:] = [path for path in sys.path if path != config["code"]] + config["site_packages"]
    for name in config["preload"]:
        __import__(name)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        if config["isolated"]:
            _isolate(config)
        pid = os.fork()
    except OSError as error:
        step = getattr(error, "step", "preparing the sandbox")
        wire.send(control, {"refused": step, "errno": error.errno, "text": str(error)})
        os._exit(1)
    if pid == 0:
        try:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL, "PDEATHSIG")
            os.close(parent_fd)
            serve(control, proc, isolated=config["isolated"])
        finally:
            os._exit(0)
    os.close(control)
    os.close(proc)
    _wait_for_either(pid, parent_fd)


def _wait_for_either(child: int, parent_fd: int) -> None:
    # Waits until the template or the caller has ended, and then ends the template: no job outlives its caller.
    poll = select.poll()
    for fd in (parent_fd, os.pidfd_open(child)):
        poll.register(fd, select.POLLIN)
    poll.poll()
    os.kill(child, signal.SIGKILL)  # it is the first process of its namespace, so the kernel ends all others with it
    os.waitpid(child, 0)
    os._exit(0)


def _isolate(config: dict[str, Any]) -> None:
    _enter_user_namespace()
    for name, flag in _NAMESPACES.items():
        kernel.unshare(flag, name)
    trees = _clone_trees(config["paths"])
    # Give up the user's own ids. If root started us we are `nobody` outside: RLIMIT_NPROC does not bind root.
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1, "dumpable")  # otherwise /proc/self/uid_map belongs to root
    kernel.sethostname("sandbox")
    _enter_root(trees)


def _enter_user_namespace() -> None:
    # Become user 0 of a new namespace; outside we stay the same user, or become nobody if we were root.
    if os.geteuid() == 0 and _maps_nobody():
        os.setgroups([])
        with _Mapper() as mapper:
            kernel.unshare(kernel.NEWUSER, _USERS)
            mapper.map_parent()
    else:
        outside = os.geteuid(), os.getegid()
        kernel.unshare(kernel.NEWUSER, _USERS)
        _put("/proc/self/setgroups", "deny")
        _write_maps("/proc/self", *outside)


class _Mapper:
    """A child outside of the namespace: only from there may a process be mapped to a user other than its own."""

    def __enter__(self) -> _Mapper:
        self._ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._ours.close()
                if theirs.recv(1):
                    _write_maps(f"/proc/{os.getppid()}", _NOBODY, _NOBODY)
                    theirs.send(b".")
            finally:
                os._exit(0)
        theirs.close()
        return self

    def map_parent(self) -> None:
        self._ours.send(b".")
        if not self._ours.recv(1):
            raise kernel.KernelRefused(f"{_USERS}: writing its map of users", errno.EPERM)

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        os.waitpid(self._pid, 0)


def _maps_nobody() -> bool:
    # The user nobody does not exist everywhere: not for the root of `unshare -Ur`.
    def covers(path: str) -> bool:
        with open(path) as file:
            return any(int(first) <= _NOBODY < int(first) + int(count) for first, _, count in map(str.split, file))

    return covers("/proc/self/uid_map") and covers("/proc/self/gid_map")


def _write_maps(process: str, user: int, group: int) -> None:
    _put(f"{process}/uid_map", f"0 {user} 1")
    _put(f"{process}/gid_map", f"0 {group} 1")


def _put(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        raise kernel.KernelRefused(f"{_USERS}: writing its map of users", error.errno or errno.EPERM) from error


# The root that jobs see.
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/share/zoneinfo")
_SYSTEM += ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives")
_OUTSIDE_USR = ("/bin", "/lib", "/lib64", "/lib32")  # on most systems these are links into /usr
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_STAGE = "/tmp"  # the new root covers it in our own mount namespace, and it vanishes with the old root
_READ_ONLY = kernel.RDONLY | kernel.NOSUID | kernel.NODEV


def _clone_trees(paths: list[str]) -> dict[str, int]:
    # What will be visible, as descriptors by path; this still needs the rights of the user who started us.
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE, "", "making the mount tree private")
    trees = {}
    for path in _outermost([*_SYSTEM, *(path for path in _OUTSIDE_USR if not os.path.islink(path)), *paths]):
        if os.path.exists(path):
            trees[path] = kernel.clone_tree(path)
            kernel.protect_tree(trees[path], _READ_ONLY)
    for device in _DEVICES:
        trees[device] = kernel.clone_tree(device)
        kernel.protect_tree(trees[device], kernel.NOSUID | kernel.NOEXEC)
    return trees


def _enter_root(trees: dict[str, int]) -> None:
    # Builds the new root from the trees and makes it the only one.
    links = [path for path in _OUTSIDE_USR if os.path.islink(path)]
    targets = {path: os.readlink(path) for path in links}
    options = "size=1m,nr_inodes=2000,mode=0755"
    kernel.mount("root", _STAGE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options, "mounting a tmpfs")
    for path, fd in trees.items():
        place = _STAGE + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(place, exist_ok=True)
        else:
            _write_file(place, "")
        kernel.attach_tree(fd, place)
        os.close(fd)
    os.mkdir(_STAGE + BOX)
    for path, target in targets.items():
        os.symlink(target, _STAGE + path)
    # It exists if Python itself lies below /tmp; TMPDIR then points into the box.
    if not os.path.lexists(_STAGE + "/tmp"):
        os.symlink(TMP, _STAGE + "/tmp")
    os.symlink(TMP, _STAGE + "/dev/shm")
    _write_file(_STAGE + "/etc/passwd", f"user:x:1000:1000::{WORK}:/bin/sh\n")
    _write_file(_STAGE + "/etc/group", "user:x:1000:\n")
    kernel.pivot_root(_STAGE)
    kernel.protect_tree(-100, _READ_ONLY, "/", recursive=False)


def _outermost(paths: list[str]) -> list[str]:
    unique = sorted({os.path.normpath(path) for path in paths})
    kept: list[str] = []
    for path in unique:
        if not any(path.startswith(parent + "/") for parent in kept):
            kept.append(path)
    return kept


def _write_file(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.suppress(FileExistsError), open(path, "x") as file:
        file.write(text)


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
    with contextlib.suppress(OSError), os.fdopen(os.open("self/oom_score_adj", os.O_WRONLY, dir_fd=proc), "w") as file:
        file.write("1000")  # if the machine runs out of memory, jobs are killed first
    site.setquit()  # `exit` and `quit`, which Python lacks without its site module
    site.sethelper()
    if isolated:
        kernel.assemble(platform.machine())
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
        folder = os.open(str(process), os.O_RDONLY | os.O_DIRECTORY, dir_fd=proc)
        try:
            signal.pidfd_send_signal(folder, signal.SIGKILL)
        finally:
            os.close(folder)
