"""One reward worker as its parent sees it: a process in its own group, a connection to it, and a reliable end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

from posttrain.rewards.channel import Channel
from posttrain.rewards.types import RewardError, RewardSpec

_ROOT = str(Path(__file__).resolve().parents[2])
# The worker imports this process's posttrain, whatever PYTHONPATH says: both ends must use the same protocol.
# Everything else is imported as the user has it.
_START = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import posttrain; del sys.path[0]; "
    "from posttrain.rewards.worker import serve; serve()"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# How long a worker that should be reading may accept nothing of a message.
_SEND_S = 60.0


class WorkerProcess:
    """A running `posttrain.rewards.worker` with its reward; it sends ("ready", spec) or ("failed", what, todo)."""

    def __init__(self, spec: RewardSpec) -> None:
        ours, theirs = socket.socketpair()
        # A plain subprocess, not multiprocessing: the user's __main__ is never imported a second time. -P keeps the
        # working folder out of the worker's own imports, where a user's random.py would shadow the standard library.
        command = [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # output that bypasses sys.stdout (C code, children) must not mix with the run's own output
            env=_environment(),
            start_new_session=True,
        )
        _guard(self.process.pid)
        theirs.close()
        self.channel = Channel(ours, send_s=_SEND_S)
        with contextlib.suppress(OSError):  # a worker that is already dead is noticed when it is read
            self.channel.send(spec)

    def wait_until_ready(self, seconds: float) -> RewardSpec:
        """Return the spec as completed by the worker; RewardError if it failed, died or took too long."""
        end = time.monotonic() + seconds
        while wait([self.channel.fileno()], max(0.0, end - time.monotonic())):
            for kind, *rest in self.channel.receive():
                if kind == "print":
                    print(rest[0])
                elif kind == "failed":
                    raise RewardError(rest[0], todo=rest[1])
                elif kind == "ready":
                    return rest[0]
            if self.channel.broken:
                raise RewardError(
                    "what a worker sent while it imported the reward could not be read",
                    todo="the file must not write into file descriptors that it did not open",
                )
            if self.channel.ended:
                raise RewardError(
                    f"a worker ended ({self.exit_text()}) while it imported the reward",
                    todo="run the file alone with python; it must be importable",
                )
        raise RewardError(
            f"importing the reward took longer than {seconds:g} s", todo="move slow work out of the file's top level"
        )

    def exit_text(self) -> str:
        """Say how the process ended: `exit code 3`, `killed by SIGSEGV`."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        hint = ", perhaps because the machine ran out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, which the kernel sends when memory is short."""
        return self.process.poll() == -signal.SIGKILL

    def kill(self) -> None:
        """End the process and whatever it started, and wait for it."""
        # Before wait(): until then the group's number cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _release(self.process.pid)
        self.channel.close()


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([] if _ROOT in paths else [_ROOT])])
    # Equal hash seeds give sets the same order in every worker, so a score cannot depend on which one computed it.
    environment.update({"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}, **dict.fromkeys(_ONE_THREAD, "1"))
    return environment


# The guardian is a process that outlives the run by a moment, to end what reward workers have started. The kernel kills
# a worker when the trainer dies, but not the programs that a reward function started. The guardian reads every worker's
# process group from a pipe; when the pipe closes, however the trainer ended, it kills the groups not released.
# A program that leaves its group (by setsid) escapes.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line[1:])
    (groups.add if line[0] == "+" else groups.discard)(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_lock = threading.Lock()
_owner: int | None = None
_pipe: int | None = None


def _guard(group: int) -> None:
    _send_to_guardian(f"+{group}\n")


def _release(group: int) -> None:
    # It has ended, and its number may be reused by others.
    _send_to_guardian(f"-{group}\n")


def _send_to_guardian(line: str) -> None:
    global _owner, _pipe
    with _lock:
        if _pipe is None or _owner != os.getpid():  # a forked child has its own workers, and its own guardian
            _pipe, _owner = _start_guardian(), os.getpid()
        # If the guardian was killed too, the kernel still ends the workers themselves.
        with contextlib.suppress(OSError):
            os.write(_pipe, line.encode())


def _start_guardian() -> int:
    theirs, ours = os.pipe()  # no other child inherits either end, so the pipe closes when the trainer ends
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    finally:
        os.close(theirs)
    return ours
