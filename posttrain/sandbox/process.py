"""One warm sandbox as its caller sees it: the processes behind it, a job at a time, and a sure end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.sandbox import wire
from posttrain.sandbox.mounts import python_paths, site_packages
from posttrain.sandbox.refusal import SandboxError, refused

_CODE = str(Path(__file__).resolve().parents[2])
_START_S = 60.0
_PATIENCE_S = 10.0
"""How much longer than its own deadline a job may take to be heard of, on a busy machine."""
_PRELOAD = """
abc argparse array ast atexit bisect calendar cmath collections contextlib copy dataclasses datetime decimal
encodings.idna enum fractions functools gc hashlib heapq inspect io itertools json linecache logging math numbers
operator os queue random re resource select shutil signal socket statistics string struct subprocess sys tempfile
textwrap threading time traceback types typing unittest uuid warnings
"""
"""Modules that every job finds imported: the standard library that short programs use."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # a program does the same in every job
    "PYTHONDONTWRITEBYTECODE": "1",
    "MALLOC_ARENA_MAX": "2",  # an arena per thread would count against the address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Lost(Exception):
    """The processes of a sandbox are gone, or do not answer."""


class SandboxProcess:
    """A launcher with its template. SandboxError if the kernel refuses."""

    def __init__(self, *, isolated: bool, preload: Sequence[str] = ()) -> None:
        self._control, theirs = socket.socketpair()
        start = f"import sys; sys.path.insert(0, {_CODE!r}); from posttrain.sandbox.launcher import main; "
        start += f"main({theirs.fileno()}, {os.getpid()})"
        # A bare interpreter with nothing in its environment: whatever is in its memory, jobs can read.
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
            raise refused(answer["refused"], answer["errno"])

    def run(self, limits: dict[str, Any], *messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run one job: what it said, and what the template said about its end. Lost if nobody is there any more."""
        end = time.monotonic() + limits["seconds"] + _PATIENCE_S
        ours, theirs = socket.socketpair()
        said: list[dict[str, Any]] = []
        try:
            with ours:
                with theirs:
                    socket.send_fds(self._control, [b"J"], [theirs.fileno()])
                self._control.sendall(wire.pack(limits))
                ours.settimeout(limits["seconds"] + _PATIENCE_S)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended before it had read all
                    for message in messages:
                        ours.sendall(wire.pack(message))
                with contextlib.suppress(wire.Closed):
                    while True:
                        said.append(self._receive(ours, end))
            verdict = self._receive(self._control, end)
        except (OSError, Lost, wire.Closed) as error:
            self.kill()
            raise Lost(str(error)) from None
        if "refused" in verdict or (said and "refused" in said[0]):
            answer = verdict if "refused" in verdict else said[0]
            raise refused(answer["refused"], answer["errno"])
        return said, verdict

    @property
    def alive(self) -> bool:
        """Whether it can take a job."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End everything at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()  # the kernel ends the template with it, and all jobs with that
        self._process.wait()
        self._control.close()

    @staticmethod
    def _receive(source: socket.socket, end: float) -> Any:
        def wait() -> None:
            if not select.select([source], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Lost("no answer in time")

        return wire.receive(source.fileno(), wait=wait)
