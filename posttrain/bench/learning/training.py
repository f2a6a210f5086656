"""Training runs, several at a time, each in a process of its own: started, watched through its metrics, and what is
kept of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.child import end_with_parent
from posttrain.bench.learning.entries import Entry
from posttrain.bench.systems import of_this_bench
from posttrain.bench.table import Line

METRIC = "val/math_reasoning/mean@1"
COMMON = (
    "preset=embedded",
    "trainer.device=cpu",
    "trainer.export_hf=none",
    "trainer.project_name=bench",
    "trainer.experiment_name=run",
    "tracking.samples_freq=0",
    "reward.num_workers=1",
)


@dataclass(frozen=True)
class Run:
    """One algorithm with one seed."""

    entry: Entry
    seed: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.entry.name} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """A run that was made with all of this the same need not be made again."""
        return {
            "algorithm": self.entry.name,
            "seed": self.seed,
            "steps": self.steps,
            "settings": list(self.entry.settings),
        }

    def command(self, folder: Path) -> list[str]:
        own = [f"trainer.seed={self.seed}", f"trainer.total_training_steps={self.steps}"]
        settings = [*COMMON, f"trainer.default_local_dir={folder}", *own, *self.entry.settings]
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *settings]


class Process:
    """The run while it goes on; its words are in `log`, its metrics below `folder`."""

    def __init__(self, run: Run, folder: Path, log: Path, threads: int) -> None:
        self.run, self.log = run, log
        self.metrics = folder / "bench" / "run" / "metrics.jsonl"
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            **of_this_bench(),
        }
        with log.open("w") as words:
            self.process = subprocess.Popen(
                run.command(folder),
                stdout=words,
                stderr=words,
                env=variables,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=end_with_parent,
            )

    def ended(self) -> bool:
        return self.process.poll() is not None

    def steps_done(self) -> int:
        return max((line["step"] for line in self._lines()), default=0)

    def result(self) -> dict[str, Any]:
        """What is kept of a finished run; `problem` instead of figures where it failed."""
        if self.process.returncode:
            return {**self.run.identity, "problem": f"status {self.process.returncode}: {_last_words(self.log)}"}
        lines = list(self._lines())
        curve = [[line["step"], line[METRIC]] for line in lines if METRIC in line]
        seconds = [line["timing_s/step"] - line.get("timing_s/validation", 0.0) for line in lines if line["step"] > 0]
        return {**self.run.identity, "curve": curve, "step_s": round(statistics.median(seconds), 4)}

    def end(self) -> None:
        """Whatever is left of it, its reward workers too."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _lines(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.metrics.read_text().splitlines() if line.endswith("}")]
        return []


def _last_words(log: Path) -> str:
    words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{words[-1] if words else 'no message'} (see {log})"


POLL_S = 0.5


def side_by_side(missing: Sequence[Run], *, jobs: int, threads: int) -> Iterator[dict[str, Any]]:
    """Yields the result of each run as it ends; at most `jobs` go on at a time."""
    line, started, waiting = Line(), time.monotonic(), list(missing)
    total, done, ended = sum(run.steps for run in missing), 0, 0
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    going: dict[Path, Process] = {}
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    own = Path(folder) / f"{run.entry.name}-{run.seed}"
                    going[own] = Process(run, own, logs / f"algorithms-{own.name}.log", threads)
                for own, process in [item for item in going.items() if item[1].ended()]:
                    del going[own]
                    result = process.result()
                    process.end()
                    shutil.rmtree(own, ignore_errors=True)
                    done, ended = done + process.run.steps, ended + 1
                    line.show(f"{_said(process.run, result)}; {ended} of {len(missing)} runs")
                    yield result
                now = done + sum(process.steps_done() for process in going.values())
                left = (time.monotonic() - started) / now * (total - now) if now else 0.0
                words = f"{ended} of {len(missing)} runs done, {len(going)} going on, step {now} of {total}"
                line.waiting(f"{words}, about {left / 60:.0f} min left,", time.monotonic() - started)
                time.sleep(POLL_S)
        finally:
            line.clear()
            for process in going.values():
                process.end()


def _said(run: Run, result: dict[str, Any]) -> str:
    if "problem" in result:
        return f"{run.title}: {result['problem']}"
    curve = result["curve"]
    return f"{run.title}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, {result['step_s']:.2f} s per step"
