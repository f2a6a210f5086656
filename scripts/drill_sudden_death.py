#!/usr/bin/env python3
"""Kills a small run again and again, at seeded moments, and compares what is left with an undisturbed run.

    python scripts/drill_sudden_death.py OUT [--kills 20] [--seed 1] [--steps 60]

Moments: while a checkpoint is being written (its temporary folder is seen), in the middle of a step, at the start
(while Python imports and the model is loaded), and right after a resume. `kill -9` goes to the trainer alone. After
every kill all checkpoints are whole, the newest is no older than before, and no process of the run is alive. Every
start continues from the newest one. At the end weights, optimizer and metrics equal those of the undisturbed run, bit
for bit. Takes minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

MOMENTS = ["writing", "step", "writing", "step", "start", "writing", "step", "resume"]
"""What the kills aim at, in turn."""
GIVE_UP_S = 600.0
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Has spread even for an untrained model: the share of characters with an even code."""
    return sum(ord(char) % 2 == 0 for char in solution_str) / max(1, len(solution_str))
'''


@dataclass
class Kill:
    """One kill: what it aimed at, where it landed, what was there before and after."""

    aim: str
    before: int
    after: int = 0
    landed_in_writing: bool = False
    problems: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a run many times; resume it; compare.")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="steps of the run (default 60)")
    options = parser.parse_args()
    drill = Drill(options.out.resolve(), options.steps, random.Random(options.seed))
    started = time.monotonic()
    drill.finish(drill.folder("undisturbed"))
    kills: list[Kill] = []
    while len(kills) < options.kills:
        kill = drill.kill(MOMENTS[len(kills) % len(MOMENTS)])
        if kill is None:  # the run was over before the moment came: it counts as one more run to compare
            continue
        kills.append(kill)
        print(f"kill {len(kills)}: {kill}", flush=True)
    drill.finish(drill.folder(f"killed-{drill.round}"))
    drill.compare(drill.round)
    report(kills, drill, time.monotonic() - started)
    sys.exit(bool(drill.problems) or any(kill.problems for kill in kills))


def report(kills: list[Kill], drill: Drill, seconds: float) -> None:
    print("| aimed at | kills | landed in writing | checkpoints lost | damaged | processes left |")
    print("|---|---|---|---|---|---|")
    for aim in dict.fromkeys(kill.aim for kill in kills):
        own = [kill for kill in kills if kill.aim == aim]
        count = lambda word, own=own: sum(any(word in p for p in kill.problems) for kill in own)  # noqa: E731
        inside = sum(kill.landed_in_writing for kill in own)
        print(f"| {aim} | {len(own)} | {inside} | {count('lost')} | {count('damaged')} | {count('alive')} |")
    print(f"{len(kills)} kills, {drill.resumes} resumes, {drill.round} runs compared, {seconds:.0f} s")
    print("\n".join(drill.problems) or "final weights, optimizer and metrics are bitwise those of the undisturbed run")


class Drill:
    """The folders, the command, and the checks."""

    def __init__(self, out: Path, steps: int, rng: random.Random) -> None:
        from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
        from posttrain.models.embedded import write_model

        self.out, self.rng, self.round, self.resumes = out, rng, 1, 0
        self.problems: list[str] = []
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = write_model(out / "tiny", **shape)
        files = write_files(out / "sums", arithmetic_rows(max_operand=10))
        (out / "reward.py").write_text(REWARD)
        settings = {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.rollout.n": 3,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "custom_reward_function.path": out / "reward.py",
            "data.train_files": files["train"],
            "data.train_batch_size": 4,
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "reward.num_workers": 1,
            "trainer.default_local_dir": out / "runs",
            "trainer.device": "cpu",
            "trainer.export_hf": "none",
            "trainer.max_ckpt_to_keep": 3,
            "trainer.project_name": "drill",
            "trainer.save_freq": 2,
            "trainer.total_training_steps": steps,
        }
        self.command = [sys.executable, "-m", "posttrain.trainer.main_ppo", *(f"{k}={v}" for k, v in settings.items())]

    def folder(self, name: str) -> Path:
        return self.out / "runs" / "drill" / name

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        log = (self.out / f"{folder.name}.log").open("ab")
        return subprocess.Popen([*self.command, f"trainer.experiment_name={folder.name}"], stdout=log, stderr=log)

    def finish(self, folder: Path) -> None:
        """Let the run come to its end."""
        newest = newest_step(folder)
        if self.start(folder).wait() != 0:
            self.problems.append(f"! the run in {folder} failed; see {self.out / folder.name}.log")
        self.check_resumed(folder, newest)

    def kill(self, aim: str) -> Kill | None:
        """Start, wait for the moment, kill, look; None if the run ended first."""
        folder = self.folder(f"killed-{self.round}")
        kill = Kill(aim, newest_step(folder))
        left, log = (
            half_written(folder),
            self.out / f"{folder.name}.log",
        )  # of earlier kills: the start clears them away
        said = resumes_in(log)
        process = self.start(folder)
        if not self.wait_for(aim, folder, process, left, said):
            if process.wait() != 0:
                self.problems.append(f"! the run in {folder} failed; see {self.out / folder.name}.log")
            self.compare(self.round)
            self.round += 1
            return None
        children = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kill.landed_in_writing = bool(half_written(folder) - left)
        kill.problems = self.look(folder, kill, children)
        if resumes_in(log) > said:
            self.check_resumed(folder, kill.before)
        return kill

    def wait_for(self, aim: str, folder: Path, process: subprocess.Popen[bytes], left: set[str], said: int) -> bool:
        """False if the run ended before its moment came."""
        rng, end = self.rng, time.monotonic() + GIVE_UP_S
        lines, wanted, pause = count_lines(folder), rng.randint(1, 3), rng.random()
        seen: set[str] = set()
        has_come: Callable[[], bool]
        if aim == "start":
            time.sleep(4 * pause)
            return process.poll() is None
        if aim == "writing":
            wanted, pause = rng.randint(1, 2), 0.03 * pause

            def has_come() -> bool:
                seen.update(half_written(folder) - left)
                return len(seen) >= wanted
        elif aim == "step":
            pause *= 0.3
            has_come = lambda: count_lines(folder) >= lines + wanted  # noqa: E731
        else:
            pause *= 0.1
            has_come = lambda: resumes_in(self.out / f"{folder.name}.log") > said  # noqa: E731
        while not has_come():
            if process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.002)
        time.sleep(pause)
        return process.poll() is None

    def look(self, folder: Path, kill: Kill, children: list[int]) -> list[str]:
        """What is wrong after a kill."""
        from posttrain.checkpoint import verify

        found = [
            f"damaged: {path.name}: {problem}"
            for path in (folder / "checkpoints").glob("global_step_*")
            for problem in verify(path)
        ]
        kill.after = newest_step(folder)
        if kill.after < kill.before:
            found.append(f"lost: the newest checkpoint was {kill.before}, is {kill.after}")
        end = time.monotonic() + 5
        while any(map(is_alive, children)) and time.monotonic() < end:
            time.sleep(0.05)
        return found + [f"alive: process {pid}" for pid in children if is_alive(pid)]

    def check_resumed(self, folder: Path, newest: int) -> None:
        """The start that has just ended went on from the newest checkpoint."""
        if newest == 0:
            return
        self.resumes += 1
        said = re.findall(r"Resumed from \S+global_step_(\d+)", (self.out / f"{folder.name}.log").read_text())
        if not said or int(said[-1]) != newest:
            self.problems.append(f"! {folder.name}: resumed from {said[-1:]}, the newest checkpoint was {newest}")

    def compare(self, number: int) -> None:
        """Weights, optimizer and metrics of a killed run against the undisturbed one."""
        import torch

        ours, theirs = self.folder(f"killed-{number}"), self.folder("undisturbed")
        left, right = tensors_of(ours), tensors_of(theirs)
        differ = [name for name in right if name not in left or not torch.equal(left[name], right[name])]
        if differ or left.keys() != right.keys():
            self.problems.append(f"! {ours.name}: {len(differ)} tensors differ, e.g. {differ[:3]}")
        if metrics_of(ours) != metrics_of(theirs):
            self.problems.append(f"! {ours.name}: metrics.jsonl differs")


def newest_step(folder: Path) -> int:
    names = (re.fullmatch(r"global_step_(\d+)", path.name) for path in (folder / "checkpoints").glob("global_step_*"))
    return max((int(match[1]) for match in names if match), default=0)


def half_written(folder: Path) -> set[str]:
    """Temporary folders of checkpoints; their names hold the writer's process id."""
    return {path.name for path in (folder / "checkpoints").glob(".writing-*[0-9]")}


def count_lines(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def resumes_in(log: Path) -> int:
    return log.read_bytes().count(b"Resumed from") if log.exists() else 0


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "timing_", "perf/"))} for line in lines]


def tensors_of(folder: Path) -> dict:
    import torch

    from posttrain.checkpoint import CheckpointManager

    manager = CheckpointManager(folder / "checkpoints")
    newest = manager.newest()
    assert newest is not None
    into = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in manager.describe(newest, "actor").items()}
    manager.load_tensors(newest, "actor", into)
    return into


def descendants(pid: int) -> list[int]:
    """All processes below `pid`."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, pending = [], [pid]
    while pending:
        below = parents.get(pending.pop(), [])
        found += below
        pending += below
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    main()
