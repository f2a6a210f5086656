"""One reward worker as its parent sees it: a process in its own group, a connection to it, and a sure way to end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

from posttrain.rewards import guardian
from posttrain.rewards.channel import Channel
from posttrain.rewards.types import RewardError, RewardSpec

_ROOT = str(Path(__file__).resolve().parents[2])
# The posttrain of this process, whichever another PYTHONPATH leads to: the two ends must speak alike. Everything else
# is found as the user has it.
_START = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); import posttrain; del sys.path[0]; "
    "from posttrain.rewards.worker import serve; serve()"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SEND_S = 60.0
"""Seconds that a worker which should be reading may take none of a message."""


class WorkerProcess:
    """A running `posttrain.rewards.worker` that was told its reward; says ("ready", spec) or ("failed", what, todo)."""

    def __init__(self, spec: RewardSpec) -> None:
        ours, theirs = socket.socketpair()
        # A plain subprocess, not multiprocessing: the user's __main__ is never imported a second time. -P keeps the
        # working folder out of the worker's own imports, where a user's random.py would shadow the standard library.
        command = [sys.executable, "-P", "-c", _START, str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what is written past sys.stdout (C code, children) must not mix with the run's own output
            env=_environment(),
            start_new_session=True,
        )
        guardian.watch(self.process.pid)
        theirs.close()
        self.channel = Channel(ours, send_s=_SEND_S)
        with contextlib.suppress(OSError):  # a worker that died already is noticed where it is read
            self.channel.send(spec)

    def wait_until_ready(self, seconds: float) -> RewardSpec:
        """The spec with what the worker found filled in; RewardError if the worker failed, died or took too long."""
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
        """How the process ended: `exit code 3`, `killed by SIGSEGV`."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        hint = ", perhaps because the machine ran out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, which the kernel sends where memory is short."""
        return self.process.poll() == -signal.SIGKILL

    def kill(self) -> None:
        """End the process and whatever it started, and wait for it."""
        # Before wait(), so that the group's number still is the worker's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        guardian.forget(self.process.pid)
        self.channel.close()


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *([] if _ROOT in paths else [_ROOT])])
    # Equal hash seeds: a set has the same order in every worker, so a score cannot depend on which one computed it.
    environment.update({"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}, **dict.fromkeys(_ONE_THREAD, "1"))
    return environment
