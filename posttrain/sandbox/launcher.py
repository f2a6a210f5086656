"""The first process of a sandbox: enters the outer namespaces, starts the template in them, and ends with either.

`process.SandboxProcess` starts it as a bare Python with an empty environment, and sends the configuration as one
message.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
from typing import Any

from posttrain.sandbox import kernel, wire
from posttrain.sandbox.mounts import clone_trees, enter_root
from posttrain.sandbox.template import serve

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
    trees = clone_trees(config["paths"])
    # Give up the user's own ids. If root started us we are `nobody` outside: RLIMIT_NPROC does not bind root.
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1, "dumpable")  # otherwise /proc/self/uid_map belongs to root
    kernel.sethostname("sandbox")
    enter_root(trees)


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
