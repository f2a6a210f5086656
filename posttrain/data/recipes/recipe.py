"""`prepare` writes the files of a recipe: rows come from a folder or the hub, and the recipe converts them."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.data.recipes import Converted, Recipe, SkippedRow, Split
from posttrain.data.recipes.arithmetic import write_files
from posttrain.data.rows import DataError, RowTable, load_rows, table_of_rows


class SourceRow(NamedTuple):
    """A row as the data set's authors wrote it."""

    table: RowTable
    number: int
    split: str
    columns: str

    @property
    def where(self) -> str:
        return self.table.where(self.number)

    def get(self, name: str) -> Any:
        return self.table.rows[self.number].get(name)

    def text(self, *names: str) -> str:
        """The text in the first of `names` that the row has; an error names the row and the data set's columns."""
        for name in names:
            if isinstance(value := self.get(name), str) and value.strip():
                return value
        raise DataError(
            f"The {names[0]} of {self.where} is missing: the columns are {self.columns}, "
            f"this row has {', '.join(self.table.rows[self.number]) or 'none'}."
        )


def _convert(recipe: Recipe, table: RowTable, split: str) -> Iterator[Converted]:
    sources = [SourceRow(table, number, split, recipe.columns) for number in range(len(table))]
    for number, row in enumerate(recipe.rows(sources)):
        if isinstance(row, dict):
            row["data_source"] = recipe.data_source or recipe.name
            row["extra_info"] = {"index": number, "split": split, **row.get("extra_info", {})}
        yield row


# A folder's own layout first, then that of a downloaded copy of the hub's repository. Texts come before parquet, so
# that a folder that also holds our own output is still read from its source.
LAYOUTS = (
    "{split}.jsonl",
    "{split}.jsonl.gz",
    "{split}.json",
    "{split}.json.gz",
    "{split}.csv",
    "{split}.parquet",
    "{split}-00000-of-00001.parquet",
    "{config}/{split}-00000-of-00001.parquet",
    "data/{split}-00000-of-00001.parquet",
)
# The branch on which the hub keeps every public data set as parquet: CONFIG/SPLIT/0000.parquet, ...
CONVERTED = "refs/convert/parquet"


def from_folder(recipe: Recipe, source: Path, out: Path) -> dict[str, RowTable]:
    """Read the splits of a local copy; a missing required one is an error."""
    # A split may be missing in a folder, if the recipe allows it.
    found = {split.name: path for split in recipe.splits if (path := _find(recipe, source, split)) is not None}
    if not found:
        names = [name for split in recipe.splits for name in _names(recipe, split)]
        raise DataError(f"--from: {source} holds no {recipe.name}; one of these is needed: {', '.join(names)}.")
    for split, path in found.items():
        if path.resolve() == (out / f"{split}.parquet").resolve():
            raise DataError(f"{path} is read and would be replaced by the result. Name another folder with --out.")
    read = {path: _read(path) for path in dict.fromkeys(found.values())}
    for table in read.values():
        if "prompt" in table.rows[0] and ("ground_truth" in table.rows[0] or "extra_info" in table.rows[0]):
            raise DataError(f"--from: {table.files[0]} holds prepared rows already; use it as data.train_files.")
    return {split: read[path] for split, path in found.items()}


def _find(recipe: Recipe, source: Path, split: Split) -> Path | None:
    if source.is_file():
        names = [name for one in recipe.splits for name in _names(recipe, one)]
        own = any(source.match(name) for name in _names(recipe, split))
        return source if own or not any(source.match(name) for name in names) else None
    if not source.is_dir():
        raise DataError(f"--from: there is no folder {source}.")
    names = _names(recipe, split)
    path = next((path for name in names for path in sorted(source.glob(name)) if path.is_file()), None)
    if path is None and not split.optional:
        raise DataError(f"--from: {source} holds no {split.name} split; one of these is needed: {', '.join(names)}.")
    return path


def _names(recipe: Recipe, split: Split) -> list[str]:
    general = [layout.format(split=split.hub or split.name, config=recipe.hub_config) for layout in LAYOUTS]
    return [*split.files, *general]


def _read(path: Path) -> RowTable:
    if path.suffix != ".csv":
        return load_rows(path, setting="--from")
    table = RowTable()
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table.add(str(path), enumerate(csv.DictReader(file), start=1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}.") from error
    if not table.rows:
        raise DataError(f"--from: there are no rows in {path}.")
    return table


def from_hub(recipe: Recipe) -> dict[str, RowTable]:
    """Read all splits from the hub, with `datasets` if it is installed."""
    try:
        return {
            split.name: table_of_rows(_hub_rows(recipe, split), name=f"{recipe.hub_id} {split.name}")
            for split in recipe.splits
        }
    except DataError:
        raise
    except Exception as error:  # every package and layer has its own errors for "no network"
        reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        splits = " and ".join(split.name for split in recipe.splits if not split.optional) or recipe.splits[0].name
        raise DataError(
            f"The data set {recipe.hub_id} could not be fetched from the hub ({reason}). Without a network, give a "
            f"folder with a copy of it: posttrain data {recipe.name} --from FOLDER, where FOLDER holds {splits} as "
            f".jsonl, .json, .csv or .parquet with the columns {recipe.columns}."
        ) from error


def _hub_rows(recipe: Recipe, split: Split) -> Iterable[Any]:
    name = split.hub or split.name
    try:
        # The package `datasets` is optional: without it, files are fetched from the hub directly.
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        return _download(recipe, name)
    return load_dataset(recipe.hub_id, recipe.hub_config, split=name)


def _download(recipe: Recipe, split: str) -> Iterator[Any]:
    import huggingface_hub as hub

    if recipe.hub_file is not None:
        files = [hub.hf_hub_download(recipe.hub_id, recipe.hub_file.format(split=split), repo_type="dataset")]
    else:
        where: dict[str, Any] = {"repo_type": "dataset", "revision": CONVERTED}
        folder = f"{recipe.hub_config}/{split}/"
        names = sorted(name for name in hub.list_repo_files(recipe.hub_id, **where) if name.startswith(folder))
        if not names:
            raise FileNotFoundError(f"no {folder} among its files")
        files = [hub.hf_hub_download(recipe.hub_id, name, **where) for name in names]
    yield from load_rows(files, setting=recipe.hub_id).rows


@dataclass
class WrittenFile:
    """One written file."""

    path: Path
    rows: int
    left_out: Counter[str]

    def __str__(self) -> str:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in self.left_out.most_common())
        return f"{self.path}: {self.rows} rows{reasons}"


def prepare(
    recipe: Recipe, source: str | os.PathLike[str] | None = None, out: str | os.PathLike[str] | None = None
) -> list[WrittenFile]:
    """Write one parquet file per split into `out` (default `$HOME/data/NAME`); without `source`, from the hub."""
    folder = Path(out).expanduser() if out is not None else recipe.folder
    tables = from_hub(recipe) if source is None else from_folder(recipe, Path(source).expanduser(), folder)
    # All of them, before any file is written.
    made = {split: list(_convert(recipe, table, split)) for split, table in tables.items()}
    rows = {split: kept for split, found in made.items() if (kept := [row for row in found if isinstance(row, dict)])}
    if not rows:
        raise DataError(f"No row of {', '.join(tables)} is of use for `posttrain data {recipe.name}`.")
    try:
        paths = write_files(folder, rows, suffix="parquet")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Name another folder with --out.") from error
    reasons = {split: Counter(row.reason for row in made[split] if isinstance(row, SkippedRow)) for split in paths}
    return [WrittenFile(path, len(rows[split]), reasons[split]) for split, path in paths.items()]
