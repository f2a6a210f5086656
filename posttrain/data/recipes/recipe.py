"""What a recipe is: where a data set lies, and how one of its rows becomes one of ours; `making.py` does the rest.

A recipe is one short file that makes a `Recipe`, a line in `table.py`, and its name in `config/environment.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
