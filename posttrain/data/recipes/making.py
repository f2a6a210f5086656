"""A data set's files, made by its recipe."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from posttrain.data.recipes.arithmetic import write_files
from posttrain.data.recipes.recipe import LeftOut, Recipe
from posttrain.data.recipes.sources import from_folder, from_hub
from posttrain.data.rows import DataError


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
