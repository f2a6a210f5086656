"""`posttrain replay RUN STEP [--print PATTERN] [--hook FILE]`."""

from __future__ import annotations

import argparse
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.checkpoint.folders import steps_in
from posttrain.errors import UserError
from posttrain.spelling import OptionParser
from posttrain.tracking.progress import waiting
from posttrain.tracking.rundir import find_run, kept_steps, read_facts

if TYPE_CHECKING:
    import torch

    from posttrain.commands.replay_updates import Watch


def main(args: Sequence[str]) -> int:
    """0 if the losses are bitwise identical to the recorded ones, 1 if not."""
    parser = OptionParser(
        prog="posttrain replay", description="Make a past step's update again from its recorded batch."
    )
    parser.add_argument("run", help="the run's folder, or its name below outputs/")
    parser.add_argument("step", type=int, nargs="?", help="the step; without it, those that can be replayed are named")
    parser.add_argument("--print", metavar="PATTERN", dest="pattern", help="show tensors by name, e.g. batch/")
    parser.add_argument("--hook", metavar="FILE", help="a Python file with `watch(name, tensor)`")
    options = parser.parse_args(args)
    run = find_run(options.run)
    if options.step is None:
        found = replayable(run)
        for step, start in found.items():
            print(f"step {step}: from {f'the checkpoint of step {start}' if start else 'the first weights'}")
        if not found:
            print(f"No step of {run} can be replayed: tracking.keep_batches keeps the batches that it takes.")
        return 0 if found else 1
    start = find_start(run, options.step)
    watch, same = _watch(options), True
    with waiting():
        from posttrain.commands.replay_updates import COMPARED, replay

    for made in replay(run, start, options.step, watch):
        losses = ", ".join(f"{name} {made.metrics[name]!r}" for name in COMPARED if name in made.metrics)
        differing = "; ".join(f"{name} was {a!r}, is {b!r}" for name, (a, b) in made.differing.items())
        print(f"step {made.step}: {losses}; " + (differing or "the recorded values, bit for bit"))
        same = same and not made.differing
    return 0 if same else 1


def _watch(options: argparse.Namespace) -> Watch | None:
    if options.hook:
        return _from_file(Path(options.hook))
    if options.pattern is None:
        return None
    wanted = re.compile(options.pattern)
    return lambda name, tensor: print(_words(name, tensor)) if wanted.search(name) else None


def _from_file(path: Path) -> Watch:
    spec = importlib.util.spec_from_file_location("replay_hook", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"--hook {path}: give a Python file that defines watch(name, tensor)")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "watch", None)):
        raise UserError(f"--hook {path}: the file defines no function watch(name, tensor)")
    return module.watch


def _words(name: str, tensor: torch.Tensor) -> str:
    values = tensor.double()
    numbers = "empty"
    if values.numel():
        numbers = f"mean {values.mean():.6g}, least {values.min():.6g}, most {values.max():.6g}"
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}: {numbers}"


class ReplayError(UserError):
    """The step cannot be replayed; the text says which ones can."""


def replayable(run: Path) -> dict[int, int]:
    """Step -> the checkpoint's step from which it can be replayed; 0 stands for the first weights."""
    kept, starts = kept_steps(run / "batches"), [0, *steps_in(run / "checkpoints")]
    found = {}
    for step in kept:
        start = max(start for start in starts if start < step)
        if set(range(start + 1, step + 1)) <= set(kept):
            found[step] = start
    return found


def find_start(run: Path, step: int) -> int:
    """The step of the checkpoint from which a step can be replayed (0: the first weights), or a ReplayError."""
    possible = replayable(run)
    if read_facts(run / "batches") is None or step not in possible:
        raise ReplayError(_why_not(run, step, possible))
    return possible[step]


def _why_not(run: Path, step: int, possible: dict[int, int]) -> str:
    if not kept_steps(run / "batches"):
        return f"{run} kept no batches: with tracking.keep_batches=-1 a run keeps those of all steps (N: the last N)."
    can = f"These can: {_ranges(sorted(possible))}." if possible else "None can."
    return (
        f"Step {step} of {run} cannot be replayed: the batches of all steps from a checkpoint up to it must be there. "
        f"{can} trainer.save_freq makes checkpoints, tracking.keep_batches keeps batches."
    )


def _ranges(steps: list[int]) -> str:
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)
