"""The public interface of the sandbox: `run` a program, or `test` one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.reward import SandboxConfig
from posttrain.sandbox.process import Lost, SandboxProcess, platform_error

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
