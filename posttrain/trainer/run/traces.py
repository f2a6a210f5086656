"""Traces of single steps (`trainer.profile_steps`): what the processor and the GPU did when, stage by stage.

Of each named step `traces/step_N.json.gz` is written by torch's profiler; with several workers there is one more for each
rank. The stages of the run are ranges in it. Any other step is not touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from posttrain.controller.pool import Workers
from posttrain.tracking.progress import say

FOLDER = "traces"


class StepTraces:
    """`of(step)` goes around every step, `stage(name)` around every stage."""

    def __init__(self, steps: Sequence[int] | None, run: Path) -> None:
        self.steps, self.folder, self.active = set(steps or ()), run / FOLDER, False
        self.workers: Workers | None = None
        """Of several ranks, which trace themselves."""

    def check(self, first: int, last: int) -> None:
        """Name the steps that will not be traced, since the run does not make them."""
        beside = sorted(step for step in self.steps if not first <= step <= last)
        if beside:
            say(f"note: trainer.profile_steps names {beside}; this run makes the steps {first} to {last}.")

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        self.folder.mkdir(exist_ok=True)
        self.active = True
        ranks = self.workers.trace(self.folder / f"step_{step}") if self.workers is not None else nullcontext()
        try:
            with ranks, traced(self.folder / f"step_{step}.json.gz"):
                yield
        finally:
            self.active = False
        say(f"Trace of step {step}: {self.folder}/step_{step}*.json.gz; https://ui.perfetto.dev opens it in a browser.")

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.active else nullcontext()


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Inside, this process is traced; the file is there when it is whole. An error inside leaves none."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        yield
    partial = path.with_name(f".{path.name}")  # its suffix decides that it is compressed
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
