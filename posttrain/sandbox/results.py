"""What came of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
