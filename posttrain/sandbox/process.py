"""One warm sandbox as its caller sees it: starts the processes, runs one job at a time, and ends them reliably."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.sandbox import wire
from posttrain.sandbox.mounts import python_paths, site_packages

_CONTAINER = (
    "in a container allow user namespaces and mounts: docker run --security-opt seccomp=unconfined "
    "--security-opt apparmor=unconfined --security-opt systempaths=unconfined, or --privileged "
    "(Kubernetes: securityContext with seccompProfile Unconfined, or privileged)"
)
_SYSCTL = (
    "as root: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), "
    "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later)"
)
_COUNT = "as root: sysctl -w user.max_user_namespaces=10000 (it is 0, or all are in use)"
_OLD = "use Linux 5.12 or later, which this sandbox needs for read-only copies of mounts"
_UNSAFE = "or set reward.sandbox.mode=unsafe, which runs programs with your rights: only for programs that you trust"


class SandboxError(UserError):
    """Programs cannot be isolated here. The message names the refused step and what to do."""


def isolation_error(step: str, number: int | None) -> SandboxError:
    """Build the error for a step that failed with this errno."""
    why = os.strerror(number) if number else "for no reason given"
    ways = []
    if number == errno.ENOSYS:
        ways.append(_OLD)
    elif number in (errno.ENOSPC, errno.EUSERS) and "namespace" in step:
        ways.append(_COUNT)
    elif step.startswith("user namespace"):
        ways += [_SYSCTL, _CONTAINER]
    else:
        ways.append(_CONTAINER)
    todo = ";\n          ".join([*ways, _UNSAFE])
    return SandboxError(
        f"the kernel does not let programs be isolated: {step}: {why}\n  set in: reward.sandbox.mode=kernel\n"
        f"  to do:  {todo}"
    )


def platform_error(platform: str) -> SandboxError:
    """Build the error for systems without namespaces."""
    return SandboxError(
        f"programs are isolated by the Linux kernel, and this is {platform}\n  set in: data_source of the data\n"
        "  to do:  run on Linux, or score these rows with a function of your own (custom_reward_function.path)"
    )


_CODE = str(Path(__file__).resolve().parents[2])
_START_S = 60.0
# On a busy machine, a job's report may arrive this much later than its deadline.
_PATIENCE_S = 10.0
# Every job finds these modules imported: the standard library that short programs use.
_PRELOAD = """
abc argparse array ast atexit bisect calendar cmath collections contextlib copy dataclasses datetime decimal
encodings.idna enum fractions functools gc hashlib heapq inspect io itertools json linecache logging math numbers
operator os queue random re resource select shutil signal socket statistics string struct subprocess sys tempfile
textwrap threading time traceback types typing unittest uuid warnings
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # so that a program behaves the same in every job
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",  # one arena per thread would count against the address space limit
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Lost(Exception):
    """The processes of a sandbox have ended, or do not answer."""


class SandboxProcess:
    """A launcher with its template. Raises SandboxError if the kernel refuses."""

    def __init__(self, *, isolated: bool, preload: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair()
        start = f"import sys; sys.path.insert(0, {_CODE!r}); from posttrain.sandbox.launcher import main; "
        start += f"main({theirs.fileno()}, {os.getpid()})"
        # A bare interpreter with an empty environment: jobs are forks of it and can read all that it holds.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-s", "-P", "-c", start],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            cwd="/",
        )
        theirs.close()
        config = {
            "code": _CODE,
            "isolated": isolated,
            "paths": python_paths(),
            "site_packages": site_packages(),
            "preload": [*_PRELOAD.split(), *preload],
        }
        try:
            self._control.sendall(wire.pack(config))
            answer = self._receive(self._control, time.monotonic() + _START_S)
        except (OSError, Lost, wire.Closed) as error:
            self.kill()
            raise SandboxError(
                f"the processes of the sandbox did not start: {error}\n"
                f"  to do:  see what {sys.executable} printed above; it must be able to import posttrain from {_CODE}"
            ) from None
        if "refused" in answer:
            self.kill()
            raise isolation_error(answer["refused"], answer["errno"])

    def run(self, limits: dict[str, Any], *messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run one job: return its messages, and the template's report on its end. Raises Lost if the processes died."""
        end = time.monotonic() + limits["seconds"] + _PATIENCE_S
        ours, theirs = socket.socketpair()
        answers: list[dict[str, Any]] = []
        try:
            with ours:
                with theirs:
                    socket.send_fds(self._control, [b"J"], [theirs.fileno()])
                self._control.sendall(wire.pack(limits))
                ours.settimeout(limits["seconds"] + _PATIENCE_S)
                # It ended before it had read everything.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    for message in messages:
                        ours.sendall(wire.pack(message))
                with contextlib.suppress(wire.Closed):
                    while True:
                        answers.append(self._receive(ours, end))
            verdict = self._receive(self._control, end)
        except (OSError, Lost, wire.Closed) as error:
            self.kill()
            raise Lost(str(error)) from None
        if "refused" in verdict or (answers and "refused" in answers[0]):
            answer = verdict if "refused" in verdict else answers[0]
            raise isolation_error(answer["refused"], answer["errno"])
        return answers, verdict

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # the kernel then ends the template, and all jobs with it
        self._process.wait()
        self._control.close()

    @staticmethod
    def _receive(source: socket.socket, end: float) -> Any:
        def wait() -> None:
            if not select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Lost("no answer in time")

        return wire.receive(source.fileno(), wait=wait)
