"""`posttrain bench scale`: a step's time by the number of workers and their layout, and where it goes.

The same run is made by one process, by one worker in Ray (what Ray itself costs), and by 2, 4, ... workers: colocated,
and separate, half of them to train and half to generate. Each run is a process of its own, one after the other. The
work is the same for all, and so are the cores: workers have the cores divided by their number as threads, at least one.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.bench.child import OF_EVERY_RUN, TrainingProcess, log_file
from posttrain.bench.device import Device, check_writable, describe_machine, find_device, write_json
from posttrain.bench.output import StatusLine, factor, render
from posttrain.cores import usable
from posttrain.errors import UserError

COMMON = (*OF_EVERY_RUN, "trainer.test_freq=-1", "trainer.val_before_train=False", "trainer.save_freq=-1")
WARM_UPS = 2  # first steps, which compile kernels and fill caches; they do not count
# Columns of the table: stages of a step as the metrics name them. What is left of a step is `other`.
STAGES = {
    "rollout": ("gen",),
    "reward": ("reward",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("update_actor", "update_critic"),
    "sync": ("sync",),
}
HEAD = ["layout", "workers", "best s", "median s", "time vs", *STAGES, "other", "start s", "note"]


@dataclass(frozen=True)
class Layout:
    """One row: `training` workers, and `generating` ones beside them."""

    name: str
    training: int = 1
    generating: int = 0
    in_ray: bool = True

    @property
    def workers(self) -> int:
        return self.training + self.generating

    @property
    def settings(self) -> list[str]:
        return [
            f"trainer.n_gpus_per_node={self.training}",
            f"actor_rollout_ref.rollout.n_workers={self.generating}",
        ]


def layouts(counts: Sequence[int]) -> list[Layout]:
    """The rows for these numbers of workers; the first is what the others are compared with."""
    found = [Layout("one process", in_ray=False)]
    for count in counts:
        found.append(Layout("in Ray" if count == 1 else "colocated", count))
        if count > 1:
            found.append(Layout("separate", count - count // 2, count // 2))
    return found


def main(options: argparse.Namespace) -> int:
    """Measure, print the table, write the file; the status is 1 if a run failed."""
    if options.steps <= WARM_UPS:
        raise UserError(f"--steps {options.steps}: the first {WARM_UPS} do not count; give more")
    path, place = check_writable(options.json), find_device(options.device)
    machine = describe_machine(usable(), place)
    rows = layouts(options.workers)
    found: dict[Layout, list[dict[str, Any]]] = {row: [] for row in rows}
    line = StatusLine()
    for number in range(options.repeat):  # in alternation: a machine that slows down affects all alike
        for row in rows:
            shown = line.begin(f"{row.name}, {row.workers} worker(s), run {number + 1} of {options.repeat}")
            found[row].append(run(row, options, place, shown))
            if path is not None:
                write_json(path, as_json(machine, options, found))
    line.clear()
    print(f"{place.words(machine['cpu'], usable())}; load before {machine['load_before'][0]}; {machine['date'][:10]}")
    print(f"GRPO on the embedded task, medians of steps {WARM_UPS + 1} to {options.steps}, {options.repeat} run(s)\n")
    print(table(found, usable() if place.kind == "cpu" else None))
    return int(any("problem" in one for runs in found.values() for one in runs))


def run(row: Layout, options: argparse.Namespace, place: Device, shown: Any) -> dict[str, Any]:
    """A run of this layout: its steps' times by stage, or `problem`."""
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        own = [f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={options.steps}"]
        settings = [*COMMON, f"trainer.device={place.kind}", *own, *row.settings, *options.settings]
        command = [sys.executable, "-m", "posttrain.bench.scale", str(row.workers), str(int(row.in_ray)), *settings]
        log = log_file(f"scale-{row.name.replace(' ', '-')}-{row.workers}")
        threads = {} if row.in_ray else {"OMP_NUM_THREADS": str(usable())}
        begun = time.monotonic()
        process = TrainingProcess(command, Path(folder), log, **threads)
        try:
            while not process.has_ended():
                shown(time.monotonic() - begun)
                time.sleep(0.2)
        finally:
            process.end(signal.SIGTERM)  # Ray's processes end with the one that started them
        seconds = time.monotonic() - begun
        if problem := process.problem():
            return {"problem": problem}
        steps = [step for step in process.steps() if step["step"] > 0]
    return {"start_s": seconds - sum(step["timing_s/step"] for step in steps), "steps": [parts(step) for step in steps]}


def parts(step: dict[str, float]) -> dict[str, float]:
    """Seconds of a step, and of its stages."""
    found = {name: sum(step.get(f"timing_s/{stage}", 0.0) for stage in stages) for name, stages in STAGES.items()}
    return {"step": step["timing_s/step"], **found, "other": step["timing_s/step"] - sum(found.values())}


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of all steps that count, by part; and the best step."""
    steps = [step for one in runs for step in one.get("steps", ())[WARM_UPS:]]
    if not steps:
        return {}
    found = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
    start = statistics.median(one["start_s"] for one in runs if "start_s" in one)
    return {**found, "best": min(step["step"] for step in steps), "start": start}


def table(found: dict[Layout, list[dict[str, Any]]], cores: int | None) -> str:
    """A row per layout. More workers than `cores` are marked: they share them, and only show what sharing costs."""
    base = medians(next(iter(found.values()))).get("step")
    rows = []
    for row, runs in found.items():
        workers = str(row.workers) if not row.generating else f"{row.training} + {row.generating}"
        problem, one = next((part["problem"] for part in runs if "problem" in part), ""), medians(runs)
        if not one:
            rows.append([row.name, workers, *["-"] * (len(HEAD) - 3), problem])
            continue
        times = [f"{one['best']:.3f}", f"{one['step']:.3f}", factor(one["step"], base)]
        stages = [f"{one[name]:.3f}" for name in (*STAGES, "other")]
        note = problem or (f"more workers than the {cores} cores" if cores and row.workers > cores else "")
        rows.append([row.name, workers, *times, *stages, f"{one['start']:.1f}", note])
    return render(HEAD, rows, left=(0, len(HEAD) - 1))


def as_json(machine: dict[str, Any], options: argparse.Namespace, found: dict[Layout, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    rows = [
        {"layout": row.name, "training": row.training, "generating": row.generating, **medians(runs), "runs": runs}
        for row, runs in found.items()
    ]
    return {**machine, "steps": options.steps, "settings": options.settings, "rows": rows}


def _train(workers: str, in_ray: str, *settings: str) -> int:
    """In the process of a run: train, with one worker in Ray if asked, and with more workers than there are cores."""
    from posttrain import cores
    from posttrain.trainer import main_ppo
    from posttrain.trainer.constants_ppo import apply_environment

    apply_environment()  # before torch is imported: its threads would spin, and slow a busy machine down many times
    from posttrain.trainer.run import process

    own = cores.usable()
    if int(workers) > own:  # which a run rejects: here it is to be seen what it costs
        cores.usable = lambda: int(workers)
    if int(in_ray):
        process.one_process = lambda config: False
    sys.argv = ["posttrain.trainer.main_ppo", *settings]
    return main_ppo.cli()


if __name__ == "__main__":
    raise SystemExit(_train(*sys.argv[1:]))
