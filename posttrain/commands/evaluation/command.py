"""`posttrain eval MODEL --data FILE`, `posttrain eval --responses FILE`, `posttrain eval compare A B`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from posttrain.commands.generation.command import read_rows, settings_folder
from posttrain.commands.generation.settings import (
    CHECKED,
    USED,
    USED_BY_REWARDS,
    Settings,
    add_arguments,
    check_model,
    read_settings,
    split_words,
)
from posttrain.errors import UserError
from posttrain.spelling import OptionParser
from posttrain.tracking.console import print_text
from posttrain.tracking.progress import waiting
from posttrain.trainer.constants_ppo import apply_environment

USAGE = """posttrain eval MODEL --data FILE [--n N] [options] [key=value ...]
       posttrain eval --responses FILE [options] [key=value ...]
       posttrain eval compare A B"""
FINISHED = "report.json"
# Flags that say how responses are made.
GENERATES = (
    "data",
    "n",
    "temperature",
    "stop",
    "system_prompt",
    "raw",
    "tools",
    *(flag for flag in CHECKED if flag != "limit"),
)


def main(args: Sequence[str]) -> int:
    """Evaluate, or compare two evaluations."""
    if args and args[0] == "compare":
        return _compare(args[1:])
    parser = OptionParser(
        prog="posttrain eval",
        usage=USAGE,
        description="Score a model's responses with the rewards of training: mean reward, accuracy, pass@k and maj@k "
        "with intervals. Killed and started again, it continues where it was.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL",
        help="folder, hub id, `embedded`, or a run's checkpoint (.../global_step_N: its run's settings serve)",
    )
    parser.add_argument(
        "--responses", action="append", metavar="FILE", help="score these instead: of `posttrain generate`, or samples"
    )
    parser.add_argument("--reward-func", metavar="FILE", help="your function; default: built-in, by data_source")
    parser.add_argument("--reward-name", metavar="NAME", help="function in that file")
    parser.add_argument("--data-source", metavar="NAME", help="data source of rows that name none")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write (default: outputs/eval/NAME)")
    add_arguments(parser)
    options = parser.parse_intermixed_args(list(args))
    model, overrides = split_words(options.words, "eval")
    if bool(options.responses) == bool(model):
        parser.error("give a MODEL with --data, or --responses (one of the two)")
    if not model and (idle := [flag for flag in GENERATES if getattr(options, flag) not in (None, False)]):
        parser.error(f"--{idle[0].replace('_', '-')} has no effect with --responses: nothing is generated")
    if model and not options.data:
        parser.error("--data is missing: parquet, json or jsonl with prompts and truths")
    used = (*USED, *USED_BY_REWARDS) if model else ("data.prompt_key", "data.data_source", *USED_BY_REWARDS)
    apply_environment()
    if model:
        check_model(model)
    settings = read_settings(options, overrides, settings_folder(model) if model else None, used=used)
    out = _folder(options, model)
    if model is None:
        return _score_file(options, settings, out)
    return _score_model(model, options, settings, out)


def _score_model(model: str, options: argparse.Namespace, settings: Settings, out: Path) -> int:
    table = read_rows(options, settings)
    with waiting():
        from posttrain.commands.evaluation.evaluate import evaluate_model
        from posttrain.commands.evaluation.report import table as lines

    report = evaluate_model(model, table, settings, out, overwrite=options.overwrite)
    print_text(lines(report))
    print(f"{out}: report.json, samples/")
    return 0


def _score_file(options: argparse.Namespace, settings: Settings, out: Path) -> int:
    with waiting():
        from posttrain.commands.evaluation.evaluate import evaluate_responses
        from posttrain.commands.evaluation.report import table as lines
        from posttrain.data.rows import load_rows

    rows = load_rows(options.responses, limit=settings.config.data.val_max_samples, setting="--responses")
    print_text(lines(evaluate_responses(rows, settings, out)))
    print(f"{out}: report.json, samples/")
    return 0


def _folder(options: argparse.Namespace, model: str | None) -> Path:
    """--out, or a folder named by model and data that holds no finished evaluation yet."""
    if options.out is not None:
        if (options.out / FINISHED).exists() and not options.overwrite:
            raise UserError(f"--out {options.out} holds an evaluation; name another folder, or give --overwrite")
        return options.out
    parts = [*Path(model).parts[-3:], *options.data] if model else options.responses
    kept = [part for part in parts if part not in ("checkpoints", "/", "huggingface")]
    name = "-".join(re.sub(r"\W+", "_", Path(part).name.split(".")[0]) for part in kept).strip("_-")
    root, number = Path("outputs") / "eval", 1
    while (root / (name if number == 1 else f"{name}-{number}") / FINISHED).exists() and not options.overwrite:
        number += 1
    return root / (name if number == 1 else f"{name}-{number}")


def _compare(args: Sequence[str]) -> int:
    parser = OptionParser(
        prog="posttrain eval compare", description="Two reports on the same prompts: differences, intervals, tests."
    )
    parser.add_argument("first", type=Path, metavar="A", help="report.json, or the folder that holds it")
    parser.add_argument("second", type=Path, metavar="B", help="likewise; differences are B - A")
    options = parser.parse_args(list(args))
    from posttrain.commands.evaluation.report import compare_files

    print_text(compare_files([options.first, options.second]))
    return 0
