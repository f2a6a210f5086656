"""Which steps of a run can be replayed, and from where; no torch, so that a wrong step is answered at once."""

from __future__ import annotations

from pathlib import Path

from posttrain.checkpoint.folders import steps_in
from posttrain.errors import UserError
from posttrain.tracking.batches import kept_steps, read_facts


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


def start_of(run: Path, step: int) -> int:
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
