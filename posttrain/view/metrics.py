"""metrics.jsonl as columns; only what was appended is read again."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain.tracking.safe_files import DamagedFile, stored_lines

# Significant digits of a number in an answer: more than a chart can show.
DIGITS = 7


class Metrics:
    """The lines of one run. A file that was replaced or truncated (by a resumed run) is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._forget(None)

    def _forget(self, identity: int | None) -> None:
        self._identity, self._offset = identity, 0
        self.lines: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._known: set[str] = set()
        self._columns: dict[str, list[Any]] = {}
        self.problem: str | None = None

    def refresh(self) -> Metrics:
        with self._lock:
            try:
                facts = self._path.stat()
            except OSError:
                self._forget(None)
                return self
            if facts.st_ino != self._identity or facts.st_size < self._offset:
                self._forget(facts.st_ino)
            if facts.st_size > self._offset and self.problem is None:
                self._read_on()
            return self

    def _read_on(self) -> None:
        try:
            for text in stored_lines(self._path, self._offset):
                self._offset += len(text)
                self._add(text)
        except FileNotFoundError:
            self._forget(None)
        except DamagedFile as error:
            self.problem = str(error)

    def _add(self, text: bytes) -> None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            self.lines.append(line)
            new = [name for name in line if name not in self._known and name != "step"]
            self._known.update(new)
            self.names += new

    def columns(self, names: Iterable[str], *, after: int = 0, identity: str = "") -> dict[str, Any]:
        """`steps` and one list per name, from line `after` on, or all if `identity` is that of another file."""
        self.refresh()
        now = str(self._identity)
        first = after if identity == now and after <= len(self.lines) else 0
        lines = self.lines[first:]
        wanted = self._meant(names)
        return {
            "identity": now,
            "first": first,
            "count": len(self.lines),
            "names": self.names,
            "problem": self.problem,
            "steps": [line["step"] for line in lines],
            "values": {name: self._column(name)[first:] for name in wanted},
        }

    def _meant(self, names: Iterable[str]) -> list[str]:
        # `val/*` means all that begin so.
        asked = list(names)
        begun = tuple(name[:-1] for name in asked if name.endswith("*"))
        exact = {name for name in asked if name in self._known}
        return [name for name in self.names if name in exact or (begun and name.startswith(begun))]

    def _column(self, name: str) -> list[Any]:
        # Columns are made at the first request and extended afterwards.
        column = self._columns.setdefault(name, [])
        with self._lock:
            column += [number(line.get(name)) for line in self.lines[len(column) :]]
        return column


def number(value: Any) -> Any:
    """A number short enough to send, None for what is none or not finite."""
    if isinstance(value, bool | int):
        return value
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}") if abs(value) < 1e9 else value
