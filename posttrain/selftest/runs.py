"""Whole runs of GRPO over the ranks, as a user starts them: they train, resume bit-for-bit, and end if a rank dies."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain import cores
from posttrain.selftest.world import CheckFailed

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 6
"""
STEPS, SAVE_EVERY = 4, 2
TIMING_PREFIXES = ("time", "timing", "perf/")  # timing metrics differ between equal runs
END_S = 90.0
"""How long a run may take to end after one of its ranks was killed, and its processes to disappear."""


class Runs:
    """Commands of one tiny model and one file of sums; everything is written below `folder`."""

    def __init__(self, folder: Path, ranks: int, gpus: int, limit: float) -> None:
        self.folder, self.limit = folder, limit
        self.workers = gpus or max(1, min(ranks, cores.usable()))
        self.device = "cuda" if gpus else "cpu"

    def command(self, name: str, **more: Any) -> list[str]:
        given = {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": self.folder / "model",
            "actor_rollout_ref.model.dtype": "float32",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.kv_cache_gb": 0.05,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "custom_reward_function.path": self.folder / "reward.py",
            "custom_reward_function.name": "score",
            "data.train_files": self.folder / "data" / "train.json",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 32,
            "data.max_response_length": 8,
            "trainer.device": self.device,
            "trainer.n_gpus_per_node": self.workers,
            "trainer.deterministic": True,
            "trainer.default_local_dir": self.folder / "runs",
            "trainer.project_name": "selftest",
            "trainer.experiment_name": name,
            "trainer.export_hf": "none",
            "trainer.total_training_steps": STEPS,
            "trainer.save_freq": SAVE_EVERY,
            "reward.num_workers": 1,
            **more,
        }
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *(f"{key}={value}" for key, value in given.items())]

    def prepare(self) -> None:
        from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

        (self.folder / "reward.py").write_text(REWARD)
        write_files(self.folder / "data", arithmetic_rows(max_operand=10))

    def run(self, name: str, **more: Any) -> list[dict[str, Any]]:
        """The metrics of each step of a run; raises if the run fails."""
        log = self.folder / f"{name}.log"
        with log.open("w") as written:
            ended = subprocess.run(
                self.command(name, **more), stdout=written, stderr=subprocess.STDOUT, timeout=self.limit, check=False
            )
        if ended.returncode:
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise CheckFailed(f"the run ended with status {ended.returncode}: {' / '.join(last)[:600]}")
        return self.metrics(name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / "selftest" / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            {key: value for key, value in json.loads(line).items() if not key.startswith(TIMING_PREFIXES)}
            for line in lines
        ]


def train(runs: Runs) -> list[str]:
    runs.prepare()
    metrics = runs.run("whole")
    if [line["step"] for line in metrics] != list(range(1, STEPS + 1)):
        raise CheckFailed(f"the run logged the steps {[line['step'] for line in metrics]}")
    if not all(line["actor/grad_norm"] > 0 for line in metrics):
        raise CheckFailed("a step has no gradient")
    done = f"{STEPS} steps of GRPO on {runs.workers} worker(s)"
    largest = max(line.get("sync/probe_max", 0.0) for line in metrics)
    return [f"{done}, largest difference between rollout and trainer log-probs {largest:.1e}"]


def resume(runs: Runs) -> list[str]:
    """Continue from the checkpoint in the middle of `train`'s run: the later steps are the same, bit-for-bit."""
    saved = runs.folder / "runs" / "selftest" / "whole" / "checkpoints" / f"global_step_{SAVE_EVERY}"
    if not saved.exists():
        raise CheckFailed("there is no checkpoint to continue from: `run` failed, or was not asked for")
    again = runs.run("resumed", **{"trainer.resume_mode": "resume_path", "trainer.resume_from_path": saved})
    later = {line["step"]: line for line in again}
    for line in runs.metrics("whole")[SAVE_EVERY:]:
        other = later.get(line["step"])
        if other is None:
            raise CheckFailed(f"the resumed run has no step {line['step']}")
        if differing := [key for key in line if key in other and line[key] != other[key]]:
            values = f"{differing[0]} is {line[differing[0]]} and {other[differing[0]]}"
            raise CheckFailed(f"step {line['step']} after a resume is not bitwise the same: {values}")
    return [f"steps {SAVE_EVERY + 1} to {STEPS} are bitwise identical to those of the uninterrupted run"]


def kill(runs: Runs) -> list[str]:
    """A rank that is killed ends the run with an error, and leaves no process."""
    log = runs.folder / "killed.log"
    # Without restarts: otherwise the run would start its ranks again and go on.
    endless = {"trainer.total_training_steps": 100000, "trainer.save_freq": -1, "trainer.max_restarts": 0}
    with log.open("w") as written:
        program = subprocess.Popen(
            runs.command("killed", **endless),
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(lambda: len(runs.metrics("killed")) >= 1 or program.poll() is not None, runs.limit, "for a first step")
        family = descendants(program.pid)
        ranks = [pid for pid in family if b"RankHost" in _command_line(pid)]
        if not ranks:
            raise CheckFailed("the run has no processes of ranks")
        os.kill(ranks[-1], signal.SIGKILL)
        begun = time.monotonic()
        _wait(lambda: program.poll() is not None, END_S, "for the run to end after a rank was killed")
        took = time.monotonic() - begun
        if program.returncode == 0:
            raise CheckFailed("a run whose rank was killed ended with status 0")
        _wait(lambda: not any(_command_line(pid) for pid in family), END_S, "for the run's processes to be gone")
    finally:
        if program.poll() is None:
            for pid in (*descendants(program.pid), program.pid):
                _kill(pid)
    return [f"the run ended {took:.1f} s after one of {len(ranks)} rank(s) was killed, and left no process"]


def _wait(done: Callable[[], bool], limit: float, what: str) -> None:
    until = time.monotonic() + limit
    while not done():
        if time.monotonic() > until:
            raise CheckFailed(f"waited {limit:.0f} s {what}")
        time.sleep(0.1)


def descendants(parent: int) -> list[int]:
    """Processes below this one, oldest first."""
    found, parents = [], {parent}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if above in parents:
            found.append(pid)
            parents.add(pid)
    return found


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def why_not(name: str, workers: int) -> str | None:
    """Why the run of this name cannot be tested here; None if it can."""
    if name == "killed rank" and workers == 1:
        return "a run of one worker is one process: there is no rank beside it to kill"
    if workers > 1 and importlib.util.find_spec("ray") is None:
        return 'ray is not installed (pip install "posttrain[ray]")'
    return None


RUNS: dict[str, tuple[str, Callable[[Runs], list[str]]]] = {
    "run": ("a whole run of GRPO over the workers", train),
    "resumed run": ("a run that is continued from its checkpoint is bitwise the same", resume),
    "killed rank": ("a rank that dies ends the run, and leaves no process", kill),
}
