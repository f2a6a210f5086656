"""The runs that a viewer shows, each under a unique name: what each reached, and how it was made.

Requests name runs, never paths. For the table of runs only the two ends of metrics.jsonl are read; `Metrics` reads all
of it, and later only what was appended. Settings come beside their defaults and with differences between runs, each
start with its command, versions and machine. Secrets are removed once more, because the files may come from
anywhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from posttrain.errors import UserError, first_line
from posttrain.texts import redact
from posttrain.tracking.rundir import ROOT, find_run, flatten, is_run, runs_under
from posttrain.tracking.safe_files import DamagedFile, open_stored, read_settings, stored_lines
from posttrain.tracking.status import age, load_status, read_origin, run_state

FILE = "config.yaml"
_SEED_OR_NAME = re.compile(
    r"(^|[._])seed$|^trainer\.(experiment_name|project_name|default_local_dir|resume_mode|resume_from_path|logger)$"
)


def settings(folder: Path) -> dict[str, str]:
    """By dotted key, as text; empty without a readable file."""
    return _read_settings(folder)[0]


def settings_problem(folder: Path) -> str | None:
    """Why the settings cannot be read; None if they can, or if there are none."""
    return _read_settings(folder)[1]


def family(folder: Path) -> str | None:
    """The same text for runs that differ only in seeds and folders; None without settings."""
    known = settings(folder)
    kept = sorted(item for item in known.items() if not _SEED_OR_NAME.search(item[0]))
    return hashlib.sha256(repr(kept).encode("utf-8", "replace")).hexdigest()[:12] if known else None


def _read_settings(folder: Path) -> tuple[dict[str, str], str | None]:
    # Read once per version of the file: the list of runs is requested again and again.
    path = folder / FILE
    try:
        version = _find_version(path)
    except DamagedFile as error:
        return {}, str(error)
    return _read_settings_version(path, version) if version else ({}, None)


def _find_version(path: Path) -> tuple[int, int, int] | None:
    # Part of the key of a cache: a file that was written to or replaced is another one. None if there is none.
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            open_stored(path)  # raises the right error
        return None
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be opened: {error.strerror}.") from error
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=2000)
def _read_settings_version(path: Path, version: tuple[int, int, int]) -> tuple[dict[str, str], str | None]:
    try:
        return flat(redact(read_settings(path))), None
    except FileNotFoundError:
        return {}, None
    except DamagedFile as error:
        return {}, str(error)


def differences(folders: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Every setting that is not the same in all runs: its key and one value per run, None where a run has none."""
    known = [settings(folder) for folder in folders.values()]
    keys = dict.fromkeys(key for one in known for key in one)
    rows = [(key, [one.get(key) for one in known]) for key in keys]
    return [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1]


def flat(tree: Mapping[Any, Any]) -> dict[str, str]:
    """By dotted key, as text."""
    return {key: "" if value is None else str(value) for key, value in flatten(tree).items()}


FACTS = ("time", "step", "command", "folder", "host")
TABLES = ("versions", "hardware")


def details(folder: Path) -> dict[str, Any]:
    """`settings`: key, value, default and sentence of each, those that differ from the default first; and `starts`."""
    known = settings(folder)
    usual, sentences = _usual(known)
    rows = [
        {
            "key": key,
            "value": value,
            "default": usual.get(key),
            "changed": value != usual.get(key),
            "sentence": sentences.get(key, ""),
        }
        for key, value in known.items()
    ]
    rows.sort(key=lambda row: not row["changed"])
    return {"settings": rows, "problem": settings_problem(folder), "starts": list(map(_start, read_origin(folder)))}


def _start(found: dict[str, Any]) -> dict[str, Any]:
    # Only plain texts are passed on: the file may come from anywhere.
    facts = {name: str(found[name]) for name in FACTS if isinstance(found.get(name), str | int)}
    tables = {name: found.get(name) for name in TABLES}
    return facts | {name: flat(table) if isinstance(table, dict) else {} for name, table in tables.items()}


def _usual(known: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    # Defaults and sentences of the kind of run (RL, SFT, ...) that shares the most keys.
    return max(_trees(), key=lambda tree: len(known.keys() & tree[0].keys()))


@cache
def _trees() -> list[tuple[dict[str, str], dict[str, str]]]:
    from posttrain.config.root import PPOConfig
    from posttrain.config.schema import leaves
    from posttrain.config.trees import COMMANDS

    roots = [PPOConfig, *(tree.root for tree in COMMANDS.values())]
    return [(flat(root().to_dict()), {key: leaf.sentence for key, leaf in leaves(root).items()}) for root in roots]


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
        # Listed at every request, because runs start and end while the page is open; by real path, because a run may be
        # reached through two folders.
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
    version = _find_version(path)
    return _read_version(path, version) if version else {}


# A table of hundreds of runs is asked for every few seconds: only files that changed are read again.
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
    # Only complete lines: the run may be writing the last one.
    found = map(_as_object, data[: data.rfind(b"\n") + 1].splitlines())
    return [line for line in found if line is not None]


def _as_object(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _last(lines: list[dict[str, Any]], pattern: re.Pattern[str]) -> dict[str, Any] | None:
    for line in reversed(lines):
        for name, value in line.items():
            if pattern.fullmatch(name) and not isinstance(value, bool) and number(value) is not None:
                return {"metric": name, "value": number(value)}
    return None


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
            # A resumed run replaces the file (another inode) or cuts its end off; what was read of it no longer holds.
            if facts.st_ino != self._identity or facts.st_size < self._offset:
                self._forget(facts.st_ino)
            if facts.st_size > self._offset and self.problem is None:
                self._read_on()
            return self

    def _read_on(self) -> None:
        try:
            for text in stored_lines(self._path, self._offset):
                # The next refresh reads on from here: a file of 100,000 steps is parsed once.
                self._offset += len(text)
                self._add(text)
        except FileNotFoundError:
            self._forget(None)
        except DamagedFile as error:
            self.problem = str(error)

    def _add(self, text: bytes) -> None:
        line = _as_object(text)
        if line is not None and isinstance(line.get("step"), int):
            self.lines.append(line)
            new = [name for name in line if name not in self._known and name != "step"]
            self._known.update(new)
            self.names += new

    def columns(self, names: Iterable[str], *, after: int = 0, identity: str = "") -> dict[str, Any]:
        """`steps` and one list per name, from line `after` on, or all if `identity` is that of another file."""
        self.refresh()
        now = str(self._identity)
        # The page sends what it has, and gets only what is new.
        first = after if identity == now and after <= len(self.lines) else 0
        lines = self.lines[first:]
        wanted = self._match_names(names)
        return {
            "identity": now,
            "first": first,
            "count": len(self.lines),
            "names": self.names,
            "problem": self.problem,
            "steps": [line["step"] for line in lines],
            "values": {name: self._column(name)[first:] for name in wanted},
        }

    def _match_names(self, names: Iterable[str]) -> list[str]:
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
