"""`posttrain reward try FN DATA [--model M -k K]`: the command around `tryout`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posttrain.config.rollout import CustomRewardConfig, RewardConfig
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.rewards.loading import resolve_reward
from posttrain.rewards.scorers.code import code_settings
from posttrain.rewards.try_report import report
from posttrain.rewards.tryout import as_trained, examine, truth_of
from posttrain.rewards.types import RewardError
from posttrain.spelling import OptionParser

# Samples responses with --model: returns each row with `response` and `group`, k times.
Sample = Callable[[argparse.Namespace, list[dict[str, Any]]], list[dict[str, Any]]]
USAGE = """posttrain reward try FN DATA [--model M [-k K]] [options] [key=value ...]
       posttrain reward try DATA                the built-in scorers, by data_source
       posttrain reward try --data DATA [--reward_func FN] [--responses FILE] ..."""
BUILT_IN = "builtin"
ROWS, PROMPTS = 1000, 100


def main(args: Sequence[str] | None = None, sample: Sample | None = None, tell: Callable[[str], object] = print) -> int:
    """Try a reward; return 0 if nothing suspicious was found. `sample` samples for --model; `tell` shows reports."""
    options = _parser().parse_intermixed_args(list(args) if args is not None else None)
    try:
        _sort_words(options)
        if options.model and options.responses:
            raise UserError("--model samples responses, and --responses gives some: take one of the two.")
        config, limits = _settings(options)
        where = options.fn_where if options.reward_func else "custom_reward_function"
        spec = resolve_reward(config, functions=limits.functions, where=where)
        spec.code = code_settings(limits)
        rows = load_rows(options.data, limit=options.limit or (PROMPTS if options.model else ROWS), setting="DATA").rows
        responses = _responses(options, rows, sample)
        found = examine(
            rows,
            spec,
            responses=responses,
            default_source=options.data_source,
            num_workers=limits.num_workers,
            timeout_s=limits.timeout_s,
            times=options.times,
        )
        found.model = options.model or ""
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    tell(report(found, spec))
    return 0 if found.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="posttrain reward try", usage=USAGE, description="Score a data file with a reward, before a run."
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="FN DATA",
        help="your function (FILE.py, FILE.py:NAME, a dotted path, a URL, or `builtin`) and a parquet, json or jsonl "
        "file with data_source and ground_truth; then settings of reward.*, custom_reward_function.* and, with "
        "--model, of data.* and actor_rollout_ref.*",
    )
    parser.add_argument("--data", help="DATA")
    parser.add_argument("--reward_func", help="FN; default: built-in, by data_source")
    parser.add_argument("--name", help="function in that file")
    parser.add_argument("--responses", help="file with `response` columns, e.g. samples/step_10.parquet of a run")
    parser.add_argument("--model", help="folder, hub id, `embedded` or a checkpoint: samples responses to the prompts")
    parser.add_argument("-k", type=int, default=5, help="samples per prompt of --model (default 5)")
    parser.add_argument("--temperature", type=float, help="of --model (default: the settings', 1)")
    parser.add_argument("--max_tokens", type=int, help="longest response of --model (default 1024)")
    parser.add_argument("--times", type=int, default=2, help="how often each response is scored (default 2)")
    parser.add_argument("--data_source", help="data source of rows that name none")
    parser.add_argument("--limit", type=int, help=f"rows to read (default {ROWS}; {PROMPTS} with --model)")
    parser.add_argument("--timeout_s", type=float, help="seconds for one score (default 10)")
    parser.add_argument("--sandbox_mode", choices=("kernel", "unsafe"), help="for rows of code (default kernel)")
    return parser


def _sort_words(options: argparse.Namespace) -> None:
    # FN, DATA and key=value may be given as words instead of flags.
    options.settings = [word for word in options.words if "=" in word and "://" not in word and not Path(word).exists()]
    words = [word for word in options.words if word not in options.settings]
    options.fn_where = f"--reward_func {options.reward_func}"
    if options.data is None and words:
        options.data = words.pop()
    if options.reward_func is None and words:
        options.reward_func = words.pop(0)
        options.fn_where = f"FN {options.reward_func}"
    if words:
        raise UserError(f"posttrain reward try takes a function and a data file; `{words[0]}` is one word too many.")
    if options.data is None:
        raise UserError("DATA is missing: posttrain reward try FN DATA, with a parquet, json or jsonl file.")
    if options.data.endswith(".py"):
        raise UserError(f"{options.data} is no data file; give both: posttrain reward try {options.data} DATA")
    if options.k < 1 or options.times < 1:
        raise UserError("-k and --times are at least 1.")
    if options.reward_func == BUILT_IN:
        options.reward_func = None
    elif options.reward_func and options.name is None:
        file, colon, name = options.reward_func.rpartition(":")
        if colon and file.endswith(".py"):
            options.reward_func, options.name = file, name


def _responses(
    options: argparse.Namespace, rows: list[dict[str, Any]], sample: Sample | None
) -> list[dict[str, Any]] | None:
    if options.model:
        assert sample is not None, "the command brings what samples"
        return sample(options, [as_trained(row) for row in rows])
    if options.responses:
        return _with_truths(load_rows(options.responses, limit=options.limit or ROWS, setting="--responses").rows, rows)
    return None


def _settings(options: argparse.Namespace) -> tuple[CustomRewardConfig, RewardConfig]:
    # Flags take precedence over settings.
    config, limits = CustomRewardConfig(), RewardConfig()
    if options.settings:
        from posttrain.config import load_config

        run = load_config(options.settings).config
        config, limits = run.custom_reward_function, run.reward
    config.path, config.name = options.reward_func or config.path, options.name or config.name
    limits.timeout_s = options.timeout_s or limits.timeout_s
    limits.sandbox.mode = options.sandbox_mode or limits.sandbox.mode
    return config, limits


def _with_truths(responses: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # Responses that carry a ground truth stay as they are; others belong to the data rows line by line.
    missing = [row for row in responses if row.get("response") is None]
    if missing:
        raise RewardError("a row of the responses has no `response`", "--responses", "name the column `response`")
    if all(truth_of(row) is not None for row in responses):
        return responses
    if len(responses) != len(rows):
        raise RewardError(
            f"{len(responses)} responses without ground_truth for {len(rows)} rows of data",
            "--responses",
            "give one response per row of --data, or add ground_truth and data_source to the responses",
        )
    return [{**as_trained(row), **response} for row, response in zip(rows, responses, strict=True)]
