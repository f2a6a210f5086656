"""Reads rows from files: parquet, JSON arrays and JSON lines become plain dicts with a known origin.

Never imports torch, so that rewards can be tried on a file at once.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.config.resolved import Problem, Resolved
from posttrain.config.trainer import HELD_OUT
from posttrain.data.recipes import RECIPES
from posttrain.data.task_packages import find_source
from posttrain.errors import UserError
from posttrain.texts import well_formed

READABLE = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz")


class DataError(UserError, ValueError):
    """A problem in the user's data: says what is wrong, where, and what to do."""


@dataclass
class RowTable:
    """Rows with their origin. Example: `table.where(0)` gives `row 1 of data/train.json`."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    # For each row, the index of its file in `files`.
    file_of: list[int] = field(default_factory=list)
    # For each row, its number in its file from 1: the line in JSON lines, else the position.
    number_of: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    # Rows with half a character somewhere, replaced by U+FFFD.
    repaired: int = 0
    # For each row, its position in the table that it was taken from; None if it was not.
    positions: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Iterable[int]) -> RowTable:
        """Return some of the rows, with their origin."""
        kept = list(rows)
        return RowTable(
            [self.rows[row] for row in kept],
            [self.file_of[row] for row in kept],
            [self.number_of[row] for row in kept],
            self.files,
            positions=[self.position(row) for row in kept],
        )

    def position(self, row: int) -> int:
        return row if self.positions is None else self.positions[row]

    def notes(self, split: str) -> list[str]:
        """Return messages about changes that were made to a split's rows."""
        if not self.repaired:
            return []
        return [
            f"{self.repaired} of {len(self)} {split} rows hold half a character (a lone surrogate, as \\ud800), which "
            "no text file can hold; U+FFFD stands in its place."
        ]

    def where(self, row: int) -> str:
        return f"row {self.number_of[row]} of {self.files[self.file_of[row]]}"

    def add(self, name: str, numbered_rows: Iterable[tuple[int, Any]], limit: int | None = None) -> None:
        """Append the rows of one file until the table holds `limit` rows."""
        self.files.append(name)
        for number, row in numbered_rows:
            if limit is not None and len(self) >= limit:
                return
            if not isinstance(row, Mapping):
                raise DataError(
                    f"Row {number} of {name} is a {type(row).__name__}; it must be an object with named fields."
                )
            halves: list[str] = []
            try:
                self.rows.append({well_formed(str(key)): plain(value, halves) for key, value in row.items()})
            except UnreadableValue as error:
                raise DataError(f"Row {number} of {name} has {error}.") from None
            self.repaired += bool(halves)
            self.file_of.append(len(self.files) - 1)
            self.number_of.append(number)


def resolve_files(files: Any, setting: str = "data.train_files") -> list[Path | str]:
    """Return the paths of one or several files, `~` and `$HOME` expanded; one error names all that are missing. Names
    such as `reasoning_gym:TASK` stay as they are."""
    if isinstance(files, str | os.PathLike):
        files = [files]
    if not files or "" in files:
        raise DataError(f"{setting} names no file; give one path or a list of paths ({', '.join(READABLE)}).")
    paths = [name if find_source(name) else _expand(name) for name in files]
    # All problems at once: fixing paths one by one takes a start of the run each.
    problems = [problem for path in paths if isinstance(path, Path) and (problem := _path_problem(path))]
    if problems:
        raise DataError(f"{setting}: " + " ".join(problems))
    return paths


def _expand(name: Any) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(os.fspath(name))))


def load_rows(files: Any, *, limit: int = -1, setting: str = "data.train_files") -> RowTable:
    """Read the rows of all files in order, at most `limit` (-1: all); no rows at all is an error."""
    if (ready := _read_tables.pop(_identity(files, limit), None)) is not None:
        return ready
    table, most = RowTable(), None if limit < 0 else limit
    for path in resolve_files(files, setting):
        name, source = str(path), find_source(path)
        table.add(name, source.read_rows(name, setting, most) if source else _read(Path(path)), most)
    if not table.rows:
        raise DataError(f"{setting}: there are no rows in {', '.join(table.files)}.")
    return table


# Tables from read_ahead, until the same files are read.
_read_tables: dict[tuple[Any, ...], RowTable] = {}


def read_ahead(files: Any, *, limit: int = -1, setting: str = "data.train_files") -> RowTable:
    """Like `load_rows`, and keep the table for the next reader of the same files."""
    table = load_rows(files, limit=limit, setting=setting)
    _read_tables[_identity(files, limit)] = table
    return table


def _identity(files: Any, limit: int) -> tuple[Any, ...]:
    # Equal for the same files, unless they were written in the meantime.
    names = [files] if isinstance(files, str | os.PathLike) else list(files or [])
    found: list[Any] = [limit]
    for name in names:
        if find_source(name):
            found.append(str(name))
            continue
        path = _expand(name)
        try:
            stat = path.stat()
        except OSError:
            return (limit, object())  # equal to nothing: the error comes from reading
        found.append((str(path.absolute()), str(name), stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def read_table(files_or_rows: Any, *, limit: int = -1, setting: str = "data.train_files") -> RowTable:
    """Return rows from one path, a list of paths, or dicts; a table is returned as it is."""
    if isinstance(files_or_rows, RowTable):
        return files_or_rows
    if files_or_rows is None or isinstance(files_or_rows, str | os.PathLike):
        return load_rows(files_or_rows, limit=limit, setting=setting)
    if (
        not isinstance(files_or_rows, Iterable)
        or isinstance(files_or_rows, Mapping)
        or hasattr(files_or_rows, "columns")
    ):
        kind = type(files_or_rows).__name__
        raise DataError(f"Data of type {kind} is not known; give paths, or a list of dicts (one per row).")
    values = list(files_or_rows)
    if values and all(isinstance(value, str | os.PathLike) for value in values):
        return load_rows(values, limit=limit, setting=setting)
    return table_of_rows(values, limit=limit)


def table_of_rows(rows: Iterable[Any], *, limit: int = -1, name: str = "the given rows") -> RowTable:
    """Make a table of rows in memory."""
    table = RowTable()
    table.add(name, enumerate(rows, start=1), None if limit < 0 else limit)
    if not table.rows:
        raise DataError(f"There are no rows in {name}.")
    return table


T = TypeVar("T")


class ItemList(Generic[T]):
    """What the data sets have in common: a list of items that is filled when the rows are read."""

    _items: list[T]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> T:
        return self._items[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)


class UnreadableValue(ValueError):
    """A value that no row can hold; the text says what it is and what to do."""


# Deeper nesting would exceed Python's recursion limit in pickles, JSON, or user code.
_DEEPEST = 200


def plain(value: Any, halves: list[str], depth: int = 0) -> Any:
    """Convert numpy arrays and scalars, tuples and other mappings to plain Python.

    Texts with half a character are repaired, and added to `halves`.
    """
    if isinstance(value, str):
        text = well_formed(str(value))
        if text != value:
            halves.append(value)
        return text
    if value is None or isinstance(value, int | float | bool):
        # numpy.float64 is a float too, and would not survive as JSON.
        return value.item() if hasattr(value, "item") else value  # type: ignore[union-attr]
    if depth > _DEEPEST:
        raise UnreadableValue(
            f"lists or objects more than {_DEEPEST} levels deep; flatten them, or save them as a text"
        )
    if isinstance(value, Mapping):
        keys = (key if isinstance(key, tuple) else plain(key, halves) for key in value)  # a list cannot be a key
        return dict(zip(keys, (plain(item, halves, depth + 1) for item in value.values()), strict=True))
    if isinstance(value, datetime.datetime | datetime.timedelta | datetime.time):
        return _plain_time(value)
    if getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m"):
        return plain(_microseconds(value).tolist(), halves, depth)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return plain(value.tolist(), halves, depth)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain(item, halves, depth + 1) for item in value]
    return value


def _plain_time(value: Any) -> Any:
    # Python's own types, whatever library made the value; None for a missing one.
    if value != value:  # pandas' NaT
        return None
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise UnreadableValue(f"a time in nanoseconds ({value}){_NANOSECONDS}")
    # pandas has its own types for columns in nanoseconds.
    for name in ("to_pydatetime", "to_pytimedelta"):
        if hasattr(value, name):
            value = getattr(value, name)()
    zone = getattr(value, "tzinfo", None)
    if zone is None or isinstance(zone, datetime.timezone) or getattr(zone, "key", None):
        return value
    # A time zone of another library: keep the moment and the offset.
    offset = value.utcoffset()
    return value if offset is None else value.replace(tzinfo=datetime.timezone(offset))


_NANOSECONDS = ", and Python's times hold whole microseconds; round the column to microseconds, or save it as a text"


def _microseconds(value: Any) -> Any:
    # In units that `tolist` converts to Python's types; it returns nanoseconds as bare integers.
    import numpy as np

    unit = np.datetime_data(value.dtype)[0]
    if unit not in ("ns", "ps", "fs", "as"):
        return value
    rounded = value.astype(f"{value.dtype.kind}8[us]")
    if not bool(np.all((rounded == value) | np.isnat(value))):
        raise UnreadableValue(f"a time finer than microseconds ({value}){_NANOSECONDS}")
    return rounded


def _path_problem(path: Path) -> str | None:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(READABLE))
        return f"{path} is a folder; name the files in it" + (f" ({', '.join(inside[:5])})." if inside else ".")
    if not path.exists():
        return f"There is no file {path}: {how_to_make(str(path))}."
    if not path.name.endswith(READABLE):
        return f"{path} has a suffix that is not known; the suffix decides the reader: {', '.join(READABLE)}."
    return None


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    if path.name.endswith(".parquet"):
        return _read_parquet(path)
    try:
        data = path.read_bytes()
        # utf-8-sig: files written on Windows may begin with a byte order mark.
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. JSON files must be UTF-8 (and .gz ones gzip).") from error
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return _read_lines(path, text)
    return _read_json(path, text)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            # In batches: as Python objects, a whole file would take several times its size.
            for batch in file.iter_batches(batch_size=1024):
                for row in _rows_of(batch, path):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet after row {number}: {error}") from error


def _rows_of(batch: Any, path: Path) -> list[dict[str, Any]]:
    # An error names the column with values that Python's types cannot hold.
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):  # ArrowInvalid is a ValueError too
        for name in batch.schema.names:
            try:
                batch.column(name).to_pylist()
            except (ValueError, OverflowError) as error:
                kind = batch.schema.field(name).type
                finer = _NANOSECONDS if "anosecond" in str(error) else f": {error}"
                raise DataError(f"Column '{name}' of {path} holds values of type {kind}{finer}.") from error
        raise


def _read_json(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # many files of JSON lines are called .json
            return _read_lines(path, text)
        raise DataError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or endless brackets
        raise DataError(f"{path} cannot be read as JSON: {error}.") from error
    # A file with a single row.
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise DataError(f"{path} holds a {type(content).__name__}; it must be a JSON array of objects.")
    return iter(enumerate(content, start=1))


def _read_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines: it also splits at U+2028, which JSON allows inside strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"Line {number} of {path} is not valid JSON: {error.msg} at column {error.colno}."
            ) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"Line {number} of {path} cannot be read as JSON: {error}.") from error


def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]:
    """Data files of a run that are not there, or are none."""
    can_hold_out = hasattr(resolved.config, "actor_rollout_ref")  # supervised trainers hold out no rows of their own
    for key in ("data.train_files", "data.val_files"):
        value = resolved.value(key)
        for name in value if isinstance(value, list) else [value]:
            if name is None or name == "embedded" or (can_hold_out and key == "data.val_files" and name == HELD_OUT):
                continue
            if getattr(resolved.config.data, "custom_cls", None):
                continue  # only the class knows what its files are
            if source := find_source(name):
                if problem := source.find_problem(str(name)):
                    yield Problem(f"`{key}`: {name} {problem[0]}.", resolved.where(key), problem[1])
                continue
            # Relative to the working folder; an absolute name replaces it.
            path, where = folder / str(name), resolved.where(key)
            if path.is_dir():
                inside = ", ".join(sorted(file.name for file in path.iterdir() if file.name.endswith(READABLE))[:5])
                do = f"name its files: it holds {inside}" if inside else f"it holds none of {', '.join(READABLE)}"
                yield Problem(f"`{key}`: {name} is a folder, not a file.", where, do)
            elif not path.is_file():
                yield Problem(f"`{key}`: the file {name} does not exist.", where, how_to_make(str(name)))
            elif not path.name.endswith(READABLE):
                what = f"`{key}`: {name} is not a data file by its suffix."
                yield Problem(what, where, f"give one of {', '.join(READABLE)}")


def how_to_make(name: str) -> str:
    """What to do about a file that does not exist: the command that makes it, if there is one."""
    folder = os.path.dirname(name) or "."
    recipe = os.path.basename(folder)
    if recipe not in RECIPES and "gsm8k" in name.lower():
        recipe = "gsm8k"
    if recipe not in RECIPES:
        return "give a parquet, json or jsonl file that exists; a relative path is taken from the working folder"
    script = " (or python examples/data_preprocess/gsm8k.py)" * (recipe == "gsm8k")
    return f"`posttrain data {recipe} --out {folder}` makes it{script}"
