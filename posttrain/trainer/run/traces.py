"""Traces of single steps (`trainer.profile_steps`): what the processor and the GPU did when, stage by stage.

Of each named step `traces/step_N.json.gz` is written by torch's profiler, with the stages of the run as ranges; with
several workers there is one more for each rank, with the calls that it answered. No other step is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from posttrain.controller.pool import Workers
from posttrain.controller.profiling import begin_trace, end_trace
from posttrain.tracking.progress import say

FOLDER = "traces"


class StepTraces:
    """`of(step)` goes around every step, `stage(name)` around every stage."""

    def __init__(self, steps: Sequence[int] | None, run: Path) -> None:
        self.steps, self.folder, self.active = set(steps or ()), run / FOLDER, False
        self.workers: Workers | None = None

    def check(self, first: int, last: int) -> None:
        """Name the steps that will not be traced, since the run does not make them."""
        if beside := sorted(step for step in self.steps if not first <= step <= last):
            say(f"note: trainer.profile_steps names {beside}, but the steps {first} to {last} are made.")

    @contextmanager
    def of(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        stem = self.folder / f"step_{step}"
        with self.workers.traced(stem) if self.workers else nullcontext():
            profiler, written, self.active = begin_trace(), None, True
            try:
                yield
                written = stem.with_name(f"{stem.name}.json.gz")
            finally:  # a step that fails leaves no trace
                self.active = False
                end_trace(profiler, written)
        say(f"Trace of step {step}: {stem}*.json.gz; open it in https://ui.perfetto.dev or chrome://tracing.")

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.active else nullcontext()
