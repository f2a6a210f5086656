"""Several training runs at a time, each in its own process, with a line that says how far all are."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.bench import bench_folder
from posttrain.bench.learning.training import Process, Run
from posttrain.bench.progress import Line

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
