"""The console of a command that trains, in one of three modes: posttrain's messages, its result alone (--quiet), or one
JSON object per step (--json).

Descriptors 1 and 2 lead to the run's `logs/libraries.log` meanwhile: what C++ code and started programs write there
does not break the live row. Before the run has a directory it is buffered.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from posttrain.errors import UserError
from posttrain.tracking.console import Console, as_console

NORMAL, QUIET, JSON = "normal", "quiet", "json"
VOICES = {"--quiet": QUIET, "--json": JSON}
HELP = "--quiet shows errors and the last result only, --json one JSON object per step and nothing else"

_active: OwnConsole | None = None


def take_voice(args: Sequence[str]) -> tuple[list[str], str]:
    """The arguments without `--quiet` and `--json`, and which of them was there."""
    found = {VOICES[arg] for arg in args if arg in VOICES}
    if len(found) > 1:
        raise UserError("--quiet and --json exclude each other: give one of them.")
    return [arg for arg in args if arg not in VOICES], found.pop() if found else NORMAL


@contextmanager
def own_console(voice: str = NORMAL) -> Iterator[OwnConsole]:
    """Around a command; afterwards streams and descriptors are as they were."""
    global _active
    before, console = _active, OwnConsole(voice)
    console.take()
    _active = console
    try:
        yield console
    finally:
        _active = before
        console.give_back()


class OwnConsole:
    """`out` and `err` lead to the console, whatever sys.stdout is."""

    def __init__(self, voice: str) -> None:
        self.voice = voice
        self._before = sys.stdout, sys.stderr
        self.out, self.err = as_console(sys.stdout), as_console(sys.stderr)
        self._kept: list[int] = []
        self._held: Any = None

    def take(self) -> None:
        for stream in self._before:
            with suppress(OSError, ValueError):
                stream.flush()
        if [_descriptor(stream) for stream in self._before] == [1, 2]:
            self._kept = [os.dup(1), os.dup(2)]
            self.out, self.err = (
                Console(_stream_like(stream, kept), owned=True)
                for stream, kept in zip(self._before, self._kept, strict=True)
            )
            self._held = tempfile.TemporaryFile()  # noqa: SIM115 (until the run has a directory)
            self._lead_to(self._held.fileno())
        loud = self.voice == NORMAL
        sys.stdout, sys.stderr = (self.out, self.err) if loud else (Console(None), Console(None))  # pyright: ignore

    def attach(self, path: Path) -> None:
        """From here on descriptors 1 and 2 lead to this file; what was held back goes there first."""
        if self._held is None:
            return
        with path.open("ab") as file:
            self._held.seek(0)
            shutil.copyfileobj(self._held, file)
            file.flush()
            self._lead_to(file.fileno())
        self._held.close()
        self._held = None

    def give_back(self) -> None:
        sys.stdout, sys.stderr = self._before
        for console in (self.out, self.err):
            console.flush()
        for number, kept in zip((1, 2), self._kept, strict=False):
            os.dup2(kept, number)
        if self._held is not None:  # there was no run: perhaps it says why
            self._held.seek(0)
            with suppress(OSError):
                os.write(2, self._held.read())
            self._held.close()
        if self._kept:
            for console in (self.out, self.err):
                console.close()

    def write_step(self, line: Mapping[str, Any]) -> None:
        """A step's numbers, as `metrics.jsonl` has them."""
        if self.voice == JSON:
            self.out.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self.out.flush()

    def end(self, result: Any) -> None:
        """The last line of a quiet command; other results than a run's have been shown."""
        if self.voice == QUIET and hasattr(result, "steps"):
            self.out.write(f"{result}\n")
            self.out.flush()

    def alert(self, text: str) -> None:
        """What must be seen although the command is quiet."""
        if self.voice != NORMAL:
            self.err.write(f"{text}\n")
            self.err.flush()

    @staticmethod
    def _lead_to(descriptor: int) -> None:
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)


def active() -> OwnConsole | None:
    """The console of the command that runs, if this process is one."""
    return _active


def _descriptor(stream: Any) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or no file at all: a notebook's
        return None


def _stream_like(stream: Any, descriptor: int) -> TextIO:
    """A stream onto a copy of the descriptor that `stream` writes to."""
    raw = io.FileIO(descriptor, "w", closefd=True)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=os.isatty(descriptor),
    )
