"""The public interface of the sandbox: `run` a program, or `test` one.

`SandboxProcess` is one warm sandbox as its caller sees it: it starts the processes, runs one job at a time, and ends
them reliably.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.config.rollout import SandboxConfig
from posttrain.errors import UserError
from posttrain.sandbox import wire

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


def python_paths() -> list[str]:
    """List the files and folders of the running interpreter, its standard library and its installed packages.

    Nothing else of a virtual environment is shown: it may be a folder that holds other things, such as a project's
    root.
    """
    paths = sysconfig.get_paths()
    found = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for prefix in dict.fromkeys([sys.base_prefix, sys.base_exec_prefix]):
        found += [os.path.join(prefix, name) for name in ("bin", "lib", "lib64")]
    found += [sys.executable, os.path.join(sys.prefix, "pyvenv.cfg")]
    found += [os.path.realpath(path) for path in found]
    return [path for path in found if os.path.exists(path)]


def site_packages() -> list[str]:
    paths = sysconfig.get_paths()
    return [path for path in dict.fromkeys([paths["purelib"], paths["platlib"]]) if os.path.isdir(path)]


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


# What to say of a program that was ended. The other statuses are `ok` (exit code 0) and `error`.
LIMITS = {
    "timeout": "took too long",
    "memory": "used too much memory",
    "processes": "had too many processes",
    "output": "wrote too much",
    "lost": "ended its sandbox",
}


@dataclass
class Result:
    """One run of a program."""

    # `ok`, `error`, or why it was ended: `timeout`, `memory`, `processes`, `output`; `lost` if the sandbox died.
    status: str
    # None if it was ended before it had one; negative for a signal.
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    # CPU time of the whole job.
    cpu_seconds: float = 0.0
    # The peak: of the largest process, or of all together with what their pipes and sockets can hold.
    memory_mb: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass
class TestReport(Result):
    """One program and its tests."""

    __test__ = False  # keeps pytest from collecting it

    # Whether the program could be imported; if not, `load_error` says why.
    loaded: bool = False
    load_error: dict[str, Any] | None = None
    # Per test `{"passed": bool, "error": text}`, or `{"value": encoded}` for a call; fewer if the program ended early.
    # `unjudged` is set if no program could pass, `unproven` if the program passed only because its own object said so.
    outcomes: list[dict[str, Any]] = field(default_factory=list)


# Files and folders in a job's working folder; open descriptors per process.
_FILES, _OPEN_FILES = 4096, 64


class Sandbox:
    """Runs programs under limits. Threads may share it: each concurrent job gets a warm process of its own."""

    def __init__(self, config: SandboxConfig | None = None, *, preload: Sequence[str] = ()) -> None:
        """`preload` names modules that jobs find imported, besides the usual ones (`("numpy",)`)."""
        if not sys.platform.startswith("linux"):
            raise platform_error(sys.platform)
        self.config = config or SandboxConfig()
        self._preload = tuple(preload)
        self._idle: list[SandboxProcess] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start one process now rather than at the first job. Raises SandboxError if the kernel refuses."""
        with self._process():
            pass

    def run(
        self,
        code: str | None = None,
        *,
        argv: Sequence[str] | None = None,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
    ) -> Result:
        """Run Python code as a script, or another program by its arguments, in a folder that holds `files`."""
        return self.run_each(code, [stdin], argv=argv, files=files)[0]

    def run_each(
        self,
        code: str | None,
        stdins: Sequence[str],
        *,
        argv: Sequence[str] | None = None,
        files: Mapping[str, str] | None = None,
        until_failure: bool = False,
    ) -> list[Result]:
        """Run a program once per standard input, within one deadline; fewer results if it exceeds a limit."""
        if (code is None) == (argv is None):
            raise ValueError("give code or argv")
        messages, verdict = self._job(
            {"source": code, "argv": list(argv or []), "stdins": list(stdins)}, files, until_failure
        )
        results = [_result(message, verdict) for message in messages]
        if verdict["reason"] and len(results) < len(stdins) and (not results or results[-1].ok):
            results.append(_result({"status": verdict["reason"]}, verdict))
        elif verdict["reason"] and results:
            results[-1].status = verdict["reason"]
        return results or [_result({"status": "lost"}, verdict)]

    def test(
        self,
        code: str,
        tests: Sequence[dict[str, Any]],
        *,
        files: Mapping[str, str] | None = None,
        until_failure: bool = False,
    ) -> TestReport:
        """Load a program as a module and run tests against it from another process; judge.py describes their form."""
        messages, verdict = self._job({"source": code, "tests": True}, files, until_failure, list(tests))
        loaded = next((message for message in messages if "loaded" in message), None)
        last = next((message for message in messages if "status" in message), {"status": "lost"})
        report = TestReport(**vars(_result(last, verdict)))
        report.status = verdict["reason"] or report.status
        report.load_error = loaded["loaded"] if loaded else None
        report.loaded = loaded is not None and report.load_error is None
        report.outcomes = [message for message in messages if "test" in message]
        return report

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for process in idle:
            process.kill()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _job(
        self, request: dict[str, Any], files: Mapping[str, str] | None, until_failure: bool, *more: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        request = {"tests": False, **request, "files": dict(files or {}), "until_failure": until_failure}
        try:
            with self._process() as process:
                return process.run(self._limits(), request, *more)
        except Lost:
            return [], {"reason": "lost", "cpu_seconds": 0.0, "memory_mb": 0.0}

    @contextmanager
    def _process(self) -> Iterator[SandboxProcess]:
        # A process that was lost, or whose job raised, is not used again.
        with self._lock:
            if self._closed:
                raise RuntimeError("this Sandbox is closed")
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.alive:
            process.kill()
            process = None
        process = process or SandboxProcess(isolated=self.config.mode == "kernel", preload=self._preload)
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(process)
                return
        process.kill()

    def _limits(self) -> dict[str, Any]:
        config = self.config
        return {
            "seconds": config.timeout_s,
            "memory_mb": config.memory_mb,
            "processes": config.processes,
            "disk_mb": config.disk_mb,
            "output_bytes": config.output_kb << 10,
            "files": _FILES,
            "open_files": _OPEN_FILES,
        }


def _result(message: dict[str, Any], verdict: dict[str, Any]) -> Result:
    return Result(**message, cpu_seconds=verdict["cpu_seconds"], memory_mb=verdict["memory_mb"])
