"""The runs of `posttrain bench algorithms`: every preset, and every estimator and loss that no preset has.

An estimator runs with the loss `vanilla`, a loss with the estimator `grpo`, all on the embedded task. `TUNED` is the
only place for settings that differ from a preset's own values; each has its reason.
"""

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
from posttrain.bench.systems import own_code_variables
from posttrain.bench.table import StatusLine
from posttrain.config.choices import ESTIMATORS, POLICY_LOSSES, PRESETS
from posttrain.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ESTIMATOR, _LOSS = "algorithm.adv_estimator", f"{_ACTOR}.policy_loss.loss_mode"
_GROUP = "algorithm/"

Tuning = tuple[tuple[str, ...], str]

# Name -> (settings, why).
TUNED: dict[str, Tuning] = {
    "dapo": (
        ("actor_rollout_ref.rollout.n=5", "algorithm.filter_groups.metric=score", "reward.overlong_buffer.len=1"),
        "groups of 5 as all others, not 16; the reward is one number; answers use at most 3 of the 4 allowed tokens",
    ),
    "remax": (
        ("actor_rollout_ref.rollout.n=5",),
        "1,000 responses a step as all others, not 200",
    ),
    "ppo": (
        ("critic.optim.lr=1e-3",),
        "the critic starts from a model that never saw a value; at its default 1e-5 it needs thousands of updates",
    ),
    "gpg_loss": (
        ("algorithm.adv_estimator=gpg", f"{_ACTOR}.ppo_mini_batch_size=200", f"{_ACTOR}.optim.lr=1e-3"),
        "only valid with one update per batch and the estimator `gpg`; it makes a quarter of the updates, so the "
        "learning rate is higher",
    ),
    "geo_mean": ((f"{_ACTOR}.clip_ratio_low=0.4",), "the paper's clip"),
    "dppo_tv": (
        (f"{_ACTOR}.clip_ratio_low=0.2", f"{_ACTOR}.clip_ratio_high=0.2", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip threshold is a difference of probabilities, typically 0.1 to 0.2",
    ),
    "dppo_kl": (
        (f"{_ACTOR}.clip_ratio_low=0.05", f"{_ACTOR}.clip_ratio_high=0.05", f"{_ACTOR}.clip_ratio_c=20"),
        "its clip threshold is a KL divergence, typically 0.05",
    ),
}


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. `kind` says what the name is: preset, estimator or loss."""

    name: str
    kind: str
    chosen: tuple[str, ...]  # the settings that select it

    @property
    def settings(self) -> tuple[str, ...]:
        return (*self.chosen, *self.tuned[0])

    @property
    def tuned(self) -> Tuning:
        return TUNED.get(self.name, ((), ""))


def all_algorithms() -> list[Algorithm]:
    """All rows, newly registered algorithms included."""
    presets = {name.removeprefix(_GROUP): values for name, (_, values) in PRESETS.items() if name.startswith(_GROUP)}
    covered = {values.get(key) for values in presets.values() for key in (_ESTIMATOR, _LOSS)} | {"vanilla"}
    rows = [Algorithm(name, "preset", (f"algorithm={name}",)) for name in presets]
    rows += [Algorithm(name, "estimator", (f"{_ESTIMATOR}={name}",)) for name in ESTIMATORS if name not in covered]
    taken = {row.name for row in rows}
    for name in POLICY_LOSSES:
        if name not in covered:
            rows.append(Algorithm(f"{name}_loss" if name in taken else name, "loss", (f"{_LOSS}={name}",)))
    return rows


def choose_algorithms(only: str | None) -> list[Algorithm]:
    """The rows named in `--only a,b`, in the table's order; all without it."""
    rows = all_algorithms()
    if only is None:
        return rows
    names = {name.strip() for name in only.split(",") if name.strip()}
    known = [row.name for row in rows]
    if unknown := sorted(names.difference(known)):
        raise UserError(f"--only names {', '.join(unknown)}; known: {', '.join(known)}")
    if not names:
        raise UserError(f"--only names nothing; known: {', '.join(known)}")
    return [row for row in rows if row.name in names]


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

    algorithm: Algorithm
    seed: int
    steps: int

    @property
    def title(self) -> str:
        return f"{self.algorithm.name} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """A run that was made with all of this the same need not be made again."""
        return {
            "algorithm": self.algorithm.name,
            "seed": self.seed,
            "steps": self.steps,
            "settings": list(self.algorithm.settings),
        }

    def command(self, folder: Path) -> list[str]:
        own = [f"trainer.seed={self.seed}", f"trainer.total_training_steps={self.steps}"]
        settings = [*COMMON, f"trainer.default_local_dir={folder}", *own, *self.algorithm.settings]
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *settings]


class Process:
    """A run in a process of its own; its output goes to `log`, its metrics are below `folder`."""

    def __init__(self, run: Run, folder: Path, log: Path, threads: int) -> None:
        self.run, self.log = run, log
        self.metrics = folder / "bench" / "run" / "metrics.jsonl"
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            **own_code_variables(),
        }
        with log.open("w") as output:
            self.process = subprocess.Popen(
                run.command(folder),
                stdout=output,
                stderr=output,
                env=variables,
                start_new_session=True,  # Ctrl-C is ours to handle
                preexec_fn=end_with_parent,
            )

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def steps_done(self) -> int:
        return max((line["step"] for line in self._lines()), default=0)

    def result(self) -> dict[str, Any]:
        """What is kept of a finished run; `problem` instead of figures where it failed."""
        if self.process.returncode:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            said = f"{lines[-1] if lines else 'no message'} (see {self.log})"
            return {**self.run.identity, "problem": f"status {self.process.returncode}: {said}"}
        lines = list(self._lines())
        curve = [[line["step"], line[METRIC]] for line in lines if METRIC in line]
        seconds = [line["timing_s/step"] - line.get("timing_s/validation", 0.0) for line in lines if line["step"] > 0]
        return {**self.run.identity, "curve": curve, "step_s": round(statistics.median(seconds), 4)}

    def end(self) -> None:
        """Kill what is left of it, reward workers included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _lines(self) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in self.metrics.read_text().splitlines() if line.endswith("}")]
        return []


def run_all(missing: Sequence[Run], *, jobs: int, threads: int) -> Iterator[dict[str, Any]]:
    """Yields the result of each run as it ends; at most `jobs` run at a time."""
    line, started, waiting = StatusLine(), time.monotonic(), list(missing)
    total, done, finished = sum(run.steps for run in missing), 0, 0
    logs = bench_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    going: dict[Path, Process] = {}
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as folder:
        try:
            while waiting or going:
                while waiting and len(going) < jobs:
                    run = waiting.pop(0)
                    own = Path(folder) / f"{run.algorithm.name}-{run.seed}"
                    going[own] = Process(run, own, logs / f"algorithms-{own.name}.log", threads)
                for own, process in [item for item in going.items() if item[1].has_ended()]:
                    del going[own]
                    result = process.result()
                    process.end()
                    shutil.rmtree(own, ignore_errors=True)
                    done, finished = done + process.run.steps, finished + 1
                    line.begin(f"{_summary(process.run, result)}; {finished} of {len(missing)} runs")
                    yield result
                # The time left is estimated from all steps so far, those of unfinished runs included.
                now = done + sum(process.steps_done() for process in going.values())
                left = (time.monotonic() - started) / now * (total - now) if now else 0.0
                words = f"{finished} of {len(missing)} runs done, {len(going)} going on, step {now} of {total}"
                line.wait(f"{words}, about {left / 60:.0f} min left,", time.monotonic() - started)
                time.sleep(0.5)
        finally:
            line.clear()
            for process in going.values():
                process.end()


def _summary(run: Run, result: dict[str, Any]) -> str:
    if "problem" in result:
        return f"{run.title}: {result['problem']}"
    curve = result["curve"]
    return f"{run.title}: {curve[0][1]:.3f} -> {curve[-1][1]:.3f}, {result['step_s']:.2f} s per step"
