"""The runs that a viewer shows, each under a unique name, and what each reached. Requests name runs, never paths.

Only the two ends of metrics.jsonl are read: a table of many runs must not read whole files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line
from posttrain.tracking.rundir import ROOT, find_run, is_run, runs_under
from posttrain.tracking.safe_files import DamagedFile, open_stored
from posttrain.tracking.status import age, load_status, run_state
from posttrain.view.metrics import number
from posttrain.view.settings import family, settings_problem


class Runs:
    """The given runs, and the runs below the given folders, where new ones appear by themselves."""

    def __init__(self, places: Sequence[str]) -> None:
        self._single: list[Path] = []
        self._roots: list[Path] = []
        for place in places or [ROOT]:
            path = Path(place)
            if not is_run(path) and os.path.isdir(path) and (runs_under(path) or not places):
                self._roots.append(path)
            else:
                self._single.append(find_run(place))
        if not self.folders():
            raise UserError(
                f"There is no run in {', '.join(map(str, self._roots))}/: `posttrain view FOLDER` looks elsewhere."
            )

    def folders(self) -> dict[str, Path]:
        """By name, oldest first. A name is the end of the path, as short as it is unique."""
        found = [folder for root in self._roots for folder in runs_under(root)] + self._single
        unique = [Path(path) for path in dict.fromkeys(os.path.realpath(folder) for folder in found)]
        return {_name(folder, unique): folder for folder in unique}

    def folder(self, name: str) -> Path | None:
        return self.folders().get(name)


def _name(folder: Path, others: Sequence[Path]) -> str:
    depth = 1
    while sum(other.parts[-depth:] == folder.parts[-depth:] for other in others) > 1:
        depth += 1
    return _readable("/".join(folder.parts[-depth:]))


def _readable(name: str) -> str:
    # Escapes control characters, among them tabs, which separate names in addresses.
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


def describe_run(name: str, folder: Path) -> dict[str, Any]:
    """The state of a run and what it reached; `problem` says what cannot be read of a damaged one."""
    problems: list[str] = []
    known, ends = (_or_problem(read, folder, problems) for read in (load_status, read_progress))
    status = "damaged" if problems and not known else run_state(folder)
    settings_wrong = settings_problem(folder)
    wanted = ("step", "total_steps", "stage", "stage_seconds", "unit", "done", "of", "tokens_per_s", "seconds_left")
    return {
        "name": name,
        "folder": _readable(str(folder)),
        "status": status,
        "age_s": round(age(known), 1),
        **{key: known.get(key) for key in (*wanted, "time", "pid", "host")},
        "reached": ends,
        "family": family(folder),
        "problem": " ".join([*problems, *([settings_wrong] if settings_wrong else [])]) or None,
    }


def _or_problem(read: Callable[[Path], dict[str, Any]], folder: Path, problems: list[str]) -> dict[str, Any]:
    # One damaged run must not keep the others from being listed.
    try:
        return read(folder)
    except DamagedFile as error:
        problems.append(str(error))
    except Exception as error:  # a folder may hold anything
        problems.append(f"{folder.name} cannot be read: {first_line(error)}.")
    return {}


# At the end of the file: about fifty steps, which usually include the newest validation.
END_BYTES = 256 * 1024
START_BYTES = 64 * 1024
# Column of the table -> the metrics that it may show, of which a run usually has one; the last value counts.
COLUMNS = {
    "reward": re.compile(r"reward_mean"),
    "accuracy": re.compile(r"right/mean|train/accuracy"),
    "validation": re.compile(r"val/.*mean@\d+|val/accuracy|val/loss"),
    "loss": re.compile(r"train/loss"),
    "throughput": re.compile(r"perf/throughput"),
}


def read_progress(folder: Path) -> dict[str, Any]:
    """{column: {metric, value}}, and when the first and the last line were written. DamagedFile if it is no file."""
    path = folder / "metrics.jsonl"
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            open_stored(path)  # raises the right error
        return {}
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be opened: {error.strerror}.") from error
    return _read_version(path, (facts.st_ino, facts.st_mtime_ns, facts.st_size))


@lru_cache(maxsize=2000)
def _read_version(path: Path, version: tuple[int, int, int]) -> dict[str, Any]:
    with open_stored(path) as file:
        start = file.read(START_BYTES)
        file.seek(max(0, version[2] - END_BYTES))
        end = file.read(END_BYTES)
    if version[2] > END_BYTES:
        end = end.partition(b"\n")[2]  # it begins within a line
    first, lines = _lines(start)[:1], _lines(end)
    found: dict[str, Any] = {column: _last(lines, pattern) for column, pattern in COLUMNS.items()}
    times = [line.get("time") for line in (*first, *lines[-1:])]
    times = [None if isinstance(time, bool) else number(time) for time in times]
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
