"""Waiting, but not for ever: one bound for every program and every condition that a test waits for.

The deadline of a whole test (`conftest.py`) names the test; what waits too long here says for what, and ends it, so
that the tests after it do not share the machine with a program that nobody wants any more.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM_S = 305.0
"""A little less than the deadline of the test that runs now, which would not say which program it was."""
CONDITION_S = 60.0

MARGIN_S = 15.0

_wait, _communicate = subprocess.Popen.wait, subprocess.Popen.communicate


def fit_deadline(seconds: float) -> None:
    """From now on a program may take almost as long as a test with this deadline."""
    global PROGRAM_S
    PROGRAM_S = seconds - MARGIN_S


def bound_waits_for_programs() -> None:
    """From now on `subprocess.run`, `Popen.wait` and `Popen.communicate` without a timeout of their own have one, and
    kill the program when it has passed."""
    subprocess.Popen.wait, subprocess.Popen.communicate = _bounded_wait, _bounded_communicate  # pyright: ignore


def _bounded_wait(self: subprocess.Popen[Any], timeout: float | None = None) -> int:
    return _wait(self, timeout) if timeout is not None else _or_killed(self, lambda: _wait(self, PROGRAM_S))


def _bounded_communicate(self: subprocess.Popen[Any], input: Any = None, timeout: float | None = None) -> Any:
    if timeout is not None:
        return _communicate(self, input, timeout)
    return _or_killed(self, lambda: _communicate(self, input, PROGRAM_S))


def _or_killed(program: subprocess.Popen[Any], wait: Callable[[], Any]) -> Any:
    try:
        return wait()
    except subprocess.TimeoutExpired as error:
        program.kill()
        error.add_note(
            f"It was killed. Its last words: {(error.output or b'')[-2000:]!r} {(error.stderr or b'')[-2000:]!r}"
        )
        raise


def until(condition: Callable[[], object], what: str, *, every_s: float = 0.01) -> None:
    """Wait for a condition; one that does not come true in time fails the test."""
    end = time.monotonic() + CONDITION_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain {what}"
        time.sleep(every_s)


def alive(pid: int) -> bool:
    """Whether a process, or a thread of it, runs: until the last has ended, its files are open. It may end at any
    moment, also between two looks at it."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(map(_runs, tasks))


def _runs(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(*pids: int, seconds: float = 5.0) -> bool:
    """Whether these have ended, or do so soon: a signal takes a moment."""
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, pids))
