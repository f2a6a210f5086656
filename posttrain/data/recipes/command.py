"""`posttrain data RECIPE ...`: every recipe by name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from posttrain.config.options import OptionParser
from posttrain.data.recipes.making import prepare
from posttrain.data.recipes.recipe import Recipe
from posttrain.data.recipes.table import RECIPES

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
    from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

    rows = arithmetic_rows(max_operand=options.max_operand, seed=options.seed)
    paths = write_files(options.out, rows, suffix=options.suffix)
    return [f"{path}: {len(rows[name])} rows" for name, path in paths.items()]


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet, json or jsonl")
    parser.add_argument("--prompt-key", required=True, metavar="COLUMN", help="column with the prompt")
    parser.add_argument("--answer-key", metavar="COLUMN", help="column with the truth that rewards compare with")
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
    from posttrain.data.recipes.convert import convert

    path, rows = convert(
        options.file,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        data_source=options.data_source,
        out=options.out,
    )
    return [f"{path}: {rows} rows", f"check the rewards of these rows: posttrain reward try {path}"]
