"""The sandbox for its users: `run` a program, or `test` one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.sandbox import SandboxConfig
from posttrain.sandbox.process import Lost, SandboxProcess, platform_error

LIMITS = {
    "timeout": "took too long",
    "memory": "used too much memory",
    "processes": "had too many processes",
    "output": "wrote too much",
    "lost": "ended its sandbox",
}
"""Statuses of programs that were ended, in words. The others are `ok` (exit code 0) and `error`."""


@dataclass
class Result:
    """One run of a program."""

    status: str
    """`ok`, `error`, or why it was ended: `timeout`, `memory`, `processes`, `output`; `lost` if the sandbox died."""
    exit_code: int | None = None
    """None if it was ended before it had one; negative for a signal."""
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of the whole job."""
    memory_mb: float = 0.0
    """The most that was seen: the largest process, or all together with what their pipes and sockets can hold."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with exit code 0."""
        return self.status == "ok"


@dataclass
class TestReport(Result):
    """One program and its tests; the run itself is over when the last test is."""

    __test__ = False  # no test case, whatever pytest makes of the name

    loaded: bool = False
    """Whether the program could be imported; if not, `load_error` says why."""
    load_error: dict[str, Any] | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """By test: `{"passed": bool, "error": text}`, or `{"value": encoded}` for a call; fewer if the program ended.

    `unjudged` is set where no program could pass, `unproven` where one passed by the word of an object of its own."""


_FILES, _OPEN_FILES = 4096, 64
"""Files and folders in a job's working folder; descriptors that a process may have open."""


class Sandbox:
    """Runs programs under limits; may be used from several threads, each of which gets a warm process of its own."""

    def __init__(self, config: SandboxConfig | None = None, *, preload: Sequence[str] = ()) -> None:
        """`preload` names modules that jobs should find imported, beyond the usual ones (`("numpy",)`)."""
        if not sys.platform.startswith("linux"):
            raise platform_error(sys.platform)
        self.config = config or SandboxConfig()
        self._preload = tuple(preload)
        self._idle: list[SandboxProcess] = []
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Have one process warm; SandboxError if the kernel refuses. Otherwise the first job does it."""
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
        """Run a program once for each standard input, within one deadline; fewer results if it passed a limit."""
        if (code is None) == (argv is None):
            raise ValueError("give code or argv")
        said, verdict = self._job(
            {"source": code, "argv": list(argv or []), "stdins": list(stdins)}, files, until_failure
        )
        results = [_result(message, verdict) for message in said]
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
        """Load a program as a module and run tests against it from another process; see judge.py for their form."""
        said, verdict = self._job({"source": code, "tests": True}, files, until_failure, list(tests))
        loaded = next((message for message in said if "loaded" in message), None)
        last = next((message for message in said if "status" in message), {"status": "lost"})
        report = TestReport(**vars(_result(last, verdict)))
        report.status = verdict["reason"] or report.status
        report.load_error = loaded["loaded"] if loaded else None
        report.loaded = loaded is not None and report.load_error is None
        report.outcomes = [message for message in said if "test" in message]
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
        """A process for one job; one that was lost, or whose job did not end in order, is not used again."""
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
