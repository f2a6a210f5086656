"""`posttrain runs`, `posttrain samples` and `posttrain plot`: run directories in the terminal, without torch."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.texts import align_columns
from posttrain.tracking.curve import LABEL_ROWS, sample_groups, text_plot
from posttrain.tracking.loggers import main_metric, metrics_of_run
from posttrain.tracking.progress import STAGE_WORDS, clock, console_width
from posttrain.tracking.rundir import ROOT, RunDirectory, find_run, runs_under
from posttrain.tracking.status import age, read_status, run_state


class NothingToShow(UserError):
    """A run has not written what was asked for; the text says what it has."""


# -- runs


def runs(args: Sequence[str]) -> int:
    parser = _parser("runs", "The runs of a folder, oldest first: how each stands, and what it reached.")
    parser.add_argument("root", nargs="?", default=ROOT, help=f"trainer.default_local_dir of the runs (default {ROOT})")
    root = parser.parse_args(args).root
    found = runs_under(root)
    if not found:
        starting = [str(lock.parent) for lock in sorted(Path(root).glob("*/*/run.lock"))]
        if starting:
            raise NothingToShow(
                f"No run in {root}/ has made a step. Starting, or ended: {', '.join(starting)} (logs/run.log)."
            )
        what = f"There is no run in {root}/" if Path(root).is_dir() else f"There is no folder {root}/"
        raise NothingToShow(f"{what}. `posttrain runs FOLDER` looks elsewhere.")
    table = [("run", "status", "step", "reached", "written"), *(_row(folder, Path(root)) for folder in found)]
    print("\n".join(align_columns(table, left=range(len(table[0])))))
    return 0


def _row(folder: Path, root: Path) -> tuple[str, str, str, str, str]:
    known = read_status(folder)
    status = run_state(folder)
    stage = known.get("stage")
    if status == "running" and stage:
        status = f"running ({STAGE_WORDS.get(stage, stage)})"
    reached = _last_value(folder)
    written = f"{clock(age(known))} ago" if known.get("time") else ""
    step = f"{known.get('step', '?')}/{known.get('total_steps', '?')}"
    return str(folder.relative_to(root)), status, step, reached, written


def _last_value(folder: Path) -> str:
    try:
        lines = metrics_of_run(folder)
    except (OSError, UserError, RecursionError):  # one damaged run must not hide the others
        return "metrics.jsonl cannot be read"
    name = main_metric(lines)
    value = next((line[name] for line in reversed(lines) if name in line), None) if name else None
    return f"{name} {value:.3f}" if isinstance(value, float) else ""


# -- samples


def samples(args: Sequence[str]) -> int:
    parser = _parser("samples", "What a model answered: prompts of one step with their responses and scores.")
    parser.add_argument("run", help="a run's folder, or its name below outputs/")
    parser.add_argument("--step", type=int, help="the step to look at (default: the newest that was kept)")
    parser.add_argument("--count", type=int, default=3, help="prompts to show (default 3)")
    parser.add_argument("--lines", type=int, default=8, help="rows of a response to show (default 8)")
    options = parser.parse_args(args)
    folder = find_run(options.run)
    path = _sample_file(folder, options.step)
    import pyarrow.parquet as pq

    names = ("uid", "sample", "branch", "prompt", "ground_truth", "response", "score", "error", "turn_rewards")
    have = pq.read_schema(path).names
    rows = pq.read_table(path, columns=[name for name in names if name in have]).to_pylist()
    # Of a conversation with branches the last row is shown: it ended there.
    last = {(row.get("uid"), row.get("sample")): number for number, row in enumerate(rows)}
    ended = set(last.values())
    rows = [row for number, row in enumerate(rows) if row.get("branch") is None or number in ended]
    print(f"{path}: {len(rows)} responses")
    print(sample_groups(rows, count=options.count, lines=options.lines, width=console_width()))
    return 0


def _sample_file(folder: Path, step: int | None) -> Path:
    from posttrain.tracking.samples import sample_files

    files = {int(path.stem.removeprefix("step_")): path for path in sample_files(folder / "samples")}
    if not files:
        raise NothingToShow(f"{folder} holds no samples: {_why_no_samples(folder)}.")
    if step is None:
        return files[max(files)]
    if step not in files:
        near = sorted(files, key=lambda kept: abs(kept - step))[:5]
        kept = ", ".join(map(str, sorted(near)))
        raise NothingToShow(f"{folder} has no samples of step {step} (tracking.samples_freq); nearest: {kept}.")
    return files[step]


def _why_no_samples(folder: Path) -> str:
    step = int(read_status(folder).get("step") or 0)
    config = RunDirectory(folder.parent.parent, folder.parent.name, folder.name).read_config() or {}
    freq = config.get("tracking", {}).get("samples_freq")
    if not step or freq is None:
        return "the run has made no step, or its trainer keeps none"
    if not freq:
        return "its tracking.samples_freq=0 keeps none"
    kept = f"its tracking.samples_freq={freq} keeps those of every {freq} steps, and it is at step {step}"
    return f"{kept}; tracking.samples_freq=1 keeps all"


# -- plot


def plot(args: Sequence[str]) -> int:
    parser = _parser("plot", "A metric over the steps of one or more runs, on one scale.")
    parser.add_argument("run", nargs="+", help="runs' folders, or their names below outputs/")
    parser.add_argument("--metric", help="a name of metrics.jsonl (default: validation, else the reward or the loss)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture with all runs in one chart too")
    options = parser.parse_args(args)
    folders = [find_run(name) for name in options.run]
    lines = {_label(folder, folders): metrics_of_run(folder) for folder in folders}
    metric = options.metric or main_metric(next(iter(lines.values()))) or "reward_mean"
    series = {name: _series(name, found, metric) for name, found in lines.items()}
    values = [value for _, one in series.values() for value in one]
    for name, (steps, found) in series.items():
        title = f"{name}: {metric}, {found[-1]:.4g} at step {steps[-1]}"
        height = 1 + LABEL_ROWS * (4 if len(series) == 1 else 2)
        print(text_plot(steps, found, title=title, height=height, scale=values, width=min(console_width(), 80)))
    if options.svg:
        from posttrain.tracking.curve import write_chart

        print(f"written: {write_chart(options.svg, series, title=str(metric), y_label=str(metric))}")
    return 0


def _series(name: str, lines: list[dict[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    found = [(line["step"], line[metric]) for line in lines if isinstance(line.get(metric), float | int)]
    if not found:
        have = sorted({key for line in lines for key in line if key != "step"})
        # `reward` of the step line is `reward_mean`: names that begin with the given word are nearest.
        near = [key for key in have if key.startswith(metric)][:3] or difflib.get_close_matches(metric, have, n=1)
        hint = f"Did you mean {' or '.join(f'`{key}`' for key in near)}? " if near else ""
        raise NothingToShow(f"{name} has no metric `{metric}`. {hint}It has: {', '.join(have) or 'none yet'}.")
    return [step for step, _ in found], [value for _, value in found]


def _label(folder: Path, all_: Sequence[Path]) -> str:
    return folder.name if len({other.name for other in all_}) == len(all_) else str(folder)


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"posttrain {verb}", description=text)
