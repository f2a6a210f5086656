"""What a run reached, for a table of many runs: the ends of its metrics.jsonl alone are read."""

from __future__ import annotations

import json
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.tracking.stored import DamagedFile, open_stored
from posttrain.view.metrics import number

END_BYTES = 256 * 1024
"""Of the end of the file: some fifty steps, among which the newest validation mostly is."""
START_BYTES = 64 * 1024
COLUMNS = {
    "reward": re.compile(r"reward_mean"),
    "accuracy": re.compile(r"right/mean|train/accuracy"),
    "validation": re.compile(r"val/.*mean@\d+|val/accuracy|val/loss"),
    "loss": re.compile(r"train/loss"),
    "throughput": re.compile(r"perf/throughput"),
}
"""Of the table -> the metrics that it may show, of which a run mostly has one; the last recorded value counts."""


def reached(folder: Path) -> dict[str, Any]:
    """{column: {metric, value}}, and when the first and the last line were written. DamagedFile if it is no file."""
    path = folder / "metrics.jsonl"
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            open_stored(path)  # says what is wrong with it
        return {}
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be opened: {error.strerror}.") from error
    return _reached(path, (facts.st_ino, facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=2000)
def _reached(path: Path, version: tuple[int, int, int]) -> dict[str, Any]:
    with open_stored(path) as file:
        start = file.read(START_BYTES)
        file.seek(max(0, version[2] - END_BYTES))
        end = file.read(END_BYTES)
    if version[2] > END_BYTES:
        end = end.partition(b"\n")[2]  # it begins within a line
    first, lines = _lines(start)[:1], _lines(end)
    found: dict[str, Any] = {column: _last(lines, pattern) for column, pattern in COLUMNS.items()}
    times = [_time(line) for line in (*first, *lines[-1:])]
    return {name: value for name, value in found.items() if value} | {
        "started": times[0] if times else None,
        "written": times[-1] if times else None,
    }


def _lines(data: bytes) -> list[dict[str, Any]]:
    found = []
    for text in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def _last(lines: list[dict[str, Any]], pattern: re.Pattern[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        for name, value in line.items():
            if pattern.fullmatch(name) and not isinstance(value, bool) and number(value) is not None:
                return {"metric": name, "value": number(value)}
    return None


def _time(line: dict[str, Any]) -> float | None:
    time = line.get("time")
    return None if isinstance(time, bool) else number(time)
