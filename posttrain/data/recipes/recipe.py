"""What a recipe is: where a data set lies, and how one of its rows becomes one of ours; `prepare` does the rest.

A recipe is one short file that makes a `Recipe`, a line in `table.py`, and its name in `config/environment.py`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.recipes.arithmetic import write_files
from posttrain.data.rows import DataError, RowTable

Row = dict[str, Any]


@dataclass(frozen=True)
class LeftOut:
    """A row that is of no use, and why; the command counts such rows."""

    reason: str


@dataclass(frozen=True)
class Split:
    """One file to be written, and where its rows come from."""

    name: str
    files: tuple[str, ...] = ()
    """Customary names of a local copy, as patterns; `NAME.jsonl` and the like are looked for besides."""
    hub: str = ""
    """The split's name on the hub, if it is another one."""
    optional: bool = False
    """Whether a folder without it will do."""


@dataclass(frozen=True)
class Recipe:
    """A data set. `rows(table, split)` makes our rows of the table's; what is left out is said with its reason."""

    name: str
    sentence: str
    splits: tuple[Split, ...]
    columns: str
    """The columns of a copy, for messages."""
    rows: Callable[[RowTable, str], Iterator[Row | LeftOut]]
    hub_id: str
    hub_config: str = "default"
    hub_file: str | None = None
    """File of a split in the hub's repository; without it the hub's own conversion to parquet is fetched."""

    @property
    def folder(self) -> Path:
        """Where the files go unless told otherwise."""
        return Path.home() / "data" / self.name


@dataclass
class Made:
    """One written file."""

    path: Path
    rows: int
    left_out: Counter[str]

    def __str__(self) -> str:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in self.left_out.most_common())
        return f"{self.path}: {self.rows} rows{reasons}"


def prepare(
    recipe: Recipe, source: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None
) -> list[Made]:
    """Write one parquet file per split into `out` (by default `$HOME/data/NAME`); without `source` from the hub."""
    from posttrain.data.recipes.sources import from_folder, from_hub

    folder = Path(out).expanduser() if out is not None else recipe.folder
    tables = from_hub(recipe) if source is None else from_folder(recipe, Path(source).expanduser(), folder)
    made = {split: list(recipe.rows(table, split)) for split, table in tables.items()}  # all, before any is written
    rows = {split: kept for split, found in made.items() if (kept := [row for row in found if isinstance(row, dict)])}
    if not rows:
        raise DataError(f"No row of {', '.join(tables)} is of use for `posttrain data {recipe.name}`.")
    try:
        paths = write_files(folder, rows, suffix="parquet")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Name another folder with --out.") from error
    reasons = {split: Counter(row.reason for row in made[split] if isinstance(row, LeftOut)) for split in paths}
    return [Made(path, len(rows[split]), reasons[split]) for split, path in paths.items()]


def text_of(table: RowTable, number: int, columns: str, *names: str) -> str:
    """The text in the first of `names` that the row has; an error names the row and what the data set's columns are."""
    row = table.rows[number]
    for name in names:
        if isinstance(row.get(name), str) and row[name].strip():
            return row[name]
    raise DataError(
        f"The {names[0]} of {table.where(number)} is missing: the columns are {columns}, "
        f"this row has {', '.join(row) or 'none'}."
    )
