"""`posttrain data RECIPE ...` prepares a data set by name; `posttrain data convert` reads other column names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.recipes import RECIPES, Recipe
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
from posttrain.data.recipes.recipe import prepare
from posttrain.data.rows import DataError, RowTable, load_rows
from posttrain.spelling import OptionParser


def convert(
    file: str | os.PathLike[str],
    *,
    prompt_key: str,
    answer_key: str | None,
    data_source: str | None,
    out: str | os.PathLike[str] | None = None,
) -> tuple[Path, int]:
    """Write `prompt`, `ground_truth`, `data_source` and the other columns (in `extra_info`); return path and count."""
    target = Path(out).expanduser() if out is not None else _beside(Path(file).expanduser())
    if target.suffix not in (".parquet", ".json"):
        raise DataError(f"--out: {target} has a suffix that cannot be written; give NAME.parquet or NAME.json.")
    if target.resolve() == Path(file).expanduser().resolve():
        raise DataError(f"--out: {target} is the file that is read; name another one.")
    table = load_rows(file, setting="FILE")
    rows = [_row(table, number, prompt_key, answer_key, data_source) for number in range(len(table))]
    try:
        write_files(target.parent, {target.stem: rows}, suffix=target.suffix[1:])
    except (OSError, ValueError, TypeError) as error:  # pyarrow's errors are ValueErrors and TypeErrors
        raise DataError(f"{target} cannot be written: {error}. Columns of mixed types need a name in .json.") from error
    return target, len(rows)


def _beside(file: Path) -> Path:
    stem = file.name.split(".")[0]
    return file.with_name(f"{stem}.converted.parquet")


def _row(
    table: RowTable, number: int, prompt_key: str, answer_key: str | None, data_source: str | None
) -> dict[str, Any]:
    row = table.rows[number]
    for flag, key in (("--prompt-key", prompt_key), ("--answer-key", answer_key)):
        if key is not None and row.get(key) in (None, "", []):
            raise DataError(
                f"{flag} {key}: {table.where(number)} has nothing there; its columns are {', '.join(row) or 'none'}."
            )
    # All other columns are kept in extra_info, where a reward can read them.
    taken = {prompt_key, answer_key, "data_source" if data_source is None else None, "extra_info"}
    own = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    others = {key: value for key, value in row.items() if key not in taken}
    made: dict[str, Any] = {"prompt": row[prompt_key]}
    if answer_key is not None:
        answer = row[answer_key]
        made["ground_truth"] = answer if isinstance(answer, str | list | dict) else str(answer)
    source = data_source or row.get("data_source")
    if source is not None:
        made["data_source"] = str(source)
    made["extra_info"] = {"index": number, **others, **own}
    return made


CONVERT = "your own file with your own column names, as rows that training and evaluation read"
ARITHMETIC = "sums such as `15 + 27 = ?`, made on the spot: train and test files"


def main(args: Sequence[str]) -> int:
    """Run one recipe and print what it wrote."""
    options = _parser().parse_args(list(args))
    for line in options.run(options):
        print(line)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="posttrain data", description="Prepare a data set.")
    verbs = parser.add_subparsers(dest="recipe", required=True, metavar="RECIPE")
    _add_arithmetic(verbs.add_parser("arithmetic", help=ARITHMETIC, description=ARITHMETIC))
    _add_convert(verbs.add_parser("convert", help=CONVERT, description=CONVERT))
    for recipe in RECIPES.values():
        _add_recipe(verbs.add_parser(recipe.name, help=recipe.sentence, description=recipe.sentence), recipe)
    return parser


def _add_recipe(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FOLDER",
        help="folder (or file) with a copy of the data set, as .jsonl, .json, .csv or .parquet with the columns "
        f"{recipe.columns} (default: the hub's {recipe.hub_id})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"folder to write (default: $HOME/data/{recipe.name})"
    )
    parser.set_defaults(run=lambda options: map(str, prepare(recipe, options.source, options.out)))


def _add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--suffix", default="json", choices=["json", "parquet"], help="file format")
    parser.add_argument("--max-operand", type=int, default=100, help="operands lie below this number")
    parser.add_argument("--seed", type=int, default=1, help="seed of the split and of the order")
    parser.set_defaults(run=_arithmetic)


def _arithmetic(options: argparse.Namespace) -> list[str]:
    rows = arithmetic_rows(max_operand=options.max_operand, seed=options.seed)
    paths = write_files(options.out, rows, suffix=options.suffix)
    return [f"{path}: {len(rows[name])} rows" for name, path in paths.items()]


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet, json or jsonl")
    parser.add_argument("--prompt-key", required=True, metavar="COLUMN", help="column with the prompt")
    parser.add_argument("--answer-key", metavar="COLUMN", help="column with the reference answer")
    parser.add_argument(
        "--data-source",
        metavar="NAME",
        help="chooses the scorer (default: the rows' own data_source)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="OUT",
        help="NAME.parquet or NAME.json (default: FILE.converted.parquet)",
    )
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> list[str]:
    path, rows = convert(
        options.file,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        data_source=options.data_source,
        out=options.out,
    )
    return [f"{path}: {rows} rows", f"check the rewards of these rows: posttrain reward try {path}"]
