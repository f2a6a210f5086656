#!/usr/bin/env python3
"""Kills and stops workers of small runs at seeded moments, and compares what comes of them with undisturbed runs.

    python scripts/drill_recovery.py OUT [--runs 20] [--seed 1] [--layouts colocated,critic,...] [--disturbances 12]
    python scripts/drill_recovery.py OUT --table        # the table of all runs recorded in OUT

Each run is disturbed up to `--disturbances` times: SIGKILL or SIGSTOP to a rank, a rollout worker or a reward worker,
at a random moment of a step or while workers are loaded. In the layout `disk` a small file system is filled instead,
which ends the run with advice; the disk is freed, and the same command continues (needs root, to mount it). The command
must end with status 0; weights, optimizer and metrics must be bitwise those of the undisturbed run; and no process,
snapshot in shared memory or folder of Ray may be left. OUT must have a short path: Ray's sockets are below it. A
disturbance takes a quarter of a minute.
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
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drill_sudden_death import REWARD, count_lines, descendants, is_alive, metrics_of, tensors_of

STOPPED_S = 3
GIVE_UP_S = 300.0
ROLLOUT = "actor_rollout_ref.rollout"
LAYOUTS: dict[str, dict[str, Any]] = {
    "colocated": {"trainer.n_workers": 2, "actor_rollout_ref.actor.use_kl_loss": True},
    "critic": {"trainer.n_workers": 2, "algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1},
    "disaggregated": {"trainer.n_workers": 1, f"{ROLLOUT}.n_workers": 1},
    "one-step-off": {"trainer.n_workers": 1, f"{ROLLOUT}.n_workers": 1, "trainer.one_step_off": True},
    # One worker trains, another one has a role for itself.
    "reward-model": {"trainer.n_workers": 1, "reward_model.enable": True, "reward_model.n_workers": 1},
    "reference": {
        "trainer.n_workers": 1,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.ref.n_workers": 1,
    },
    "disk": {"trainer.n_workers": 2},
}
# How the processes of a role are known, by their command lines.
ROLES = {"rank": "ray::RankHost", "reward worker": "posttrain.rewards.worker"}


@dataclass
class Disturbance:
    """One signal: to which role, in which stage it was noticed, and how long the run took to react."""

    role: str
    signal: str
    stage: str = ""
    seconds: float = 0.0
    alone: bool = False  # whether it was replaced while the others went on


@dataclass
class Record:
    """One run."""

    layout: str
    seed: int
    disturbances: list[Disturbance] = field(default_factory=list)
    status: int | None = None
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    apart: float = 0.0  # how far weights are from those of the undisturbed run, where the number of ranks has changed


def main() -> None:
    parser = argparse.ArgumentParser(description="Disturb the workers of runs; compare.")
    parser.add_argument("out", type=Path, help="a folder with a short path; what is there is added to")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--disturbances", type=int, default=12, help="of a run, at most; a full disk is one of its own")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    drill = Drill(options.out.resolve(), options.steps, options.disturbances)
    if not options.table:
        layouts = options.layouts.split(",")
        for number in range(options.runs):
            record = drill.run(layouts[number % len(layouts)], options.seed + number)
            print(json.dumps(asdict(record)), flush=True)
    print_table(drill.records())
    sys.exit(any(record["problems"] for record in drill.records()))


def print_table(records: list[dict[str, Any]]) -> None:
    print(
        "| layout | runs | disturbed | SIGKILL | SIGSTOP | whom | in stage | replaced alone | seconds | failed runs |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for layout in dict.fromkeys(record["layout"] for record in records):
        own = [record for record in records if record["layout"] == layout]
        all_of = [one for record in own for one in record["disturbances"]]
        kinds, roles, stages = (Counter(one[name] for one in all_of) for name in ("signal", "role", "stage"))
        seconds = sorted(one["seconds"] for one in all_of if one["seconds"])
        middle = f"{seconds[len(seconds) // 2]:.0f}, at most {seconds[-1]:.0f}" if seconds else ""
        whom, where = (", ".join(f"{what} {n}" for what, n in of.most_common() if what) for of in (roles, stages))
        problems = sum(bool(record["problems"]) for record in own)
        numbers = f"{len(own)} | {len(all_of)} | {kinds['SIGKILL']} | {kinds['SIGSTOP']}"
        alone = sum(one.get("alone", False) for one in all_of)
        print(f"| {layout} | {numbers} | {whom} | {where} | {alone} | {middle} | {problems} |")
    for record in records:
        for problem in record["problems"]:
            print(f"! {record['layout']} {record['seed']}: {problem}")


class Drill:
    """The folders, the commands, and the checks."""

    def __init__(self, out: Path, steps: int, disturbances: int) -> None:
        self.out, self.steps, self.disturbances, self.log = out, steps, disturbances, out / "records.jsonl"
        self.rays, self.disk = out / "ray", out / "disk"
        self.snapshots: set[str] = set()  # folders of the run in shared memory
        if not (out / "tiny").exists():
            from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
            from posttrain.models.embedded import write_model

            shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
            write_model(out / "tiny", **shape)
            write_reward_model(out / "scores", **shape)
            write_files(out / "sums", arithmetic_rows(max_operand=10))
            (out / "reward.py").write_text(REWARD)
        for folder in (self.rays, self.disk):
            folder.mkdir(exist_ok=True)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def settings(self, layout: str, root: Path, name: str) -> dict[str, Any]:
        return {
            "algorithm.adv_estimator": "grpo",
            "actor_rollout_ref.model.path": self.out / "tiny",
            f"{ROLLOUT}.n": 3,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "custom_reward_function.path": self.out / "reward.py",
            "data.train_files": self.out / "sums" / "train.json",
            "data.train_batch_size": 4,
            "data.max_prompt_length": 32,
            "data.max_response_length": 6,
            "reward.num_workers": 1,
            "reward.timeout_s": 4,
            "reward_model.model.path": self.out / "scores",
            "trainer.default_local_dir": root,
            "trainer.device": "cpu",
            "trainer.export_hf": "none",
            "trainer.max_ckpt_to_keep": 2,
            "trainer.project_name": "drill",
            "trainer.experiment_name": name,
            "trainer.save_freq": 3,
            "trainer.stopped_worker_timeout_s": STOPPED_S,
            "trainer.total_training_steps": self.steps,
            **LAYOUTS[layout],
        }

    def start(self, layout: str, root: Path, name: str) -> subprocess.Popen[bytes]:
        given = [f"{key}={value}" for key, value in self.settings(layout, root, name).items()]
        log = (self.out / f"{name}.log").open("ab")
        return subprocess.Popen(
            [sys.executable, "-m", "posttrain.trainer.main_ppo", *given],
            stdout=log,
            stderr=log,
            env={**os.environ, "TMPDIR": str(self.rays)},
        )

    def undisturbed(self, layout: str) -> Path:
        folder = self.out / "runs" / "drill" / layout
        if count_lines(folder) < self.steps:
            assert self.start(layout, self.out / "runs", layout).wait() == 0, f"see {self.out / layout}.log"
        return folder

    def run(self, layout: str, seed: int) -> Record:
        straight, rng, record = self.undisturbed(layout), random.Random(f"{layout} {seed}"), Record(layout, seed)
        name, started = f"{layout}-{seed}", time.monotonic()
        self.snapshots.clear()
        root = self.disk if layout == "disk" else self.out / "runs"
        folder = root / "drill" / name
        if layout == "disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(self.disk)], check=True)
        try:
            process, seen = self.start(layout, root, name), set[int]()
            if layout == "disk":
                process = self.fill(process, folder, name, rng, record, seen)
            else:
                for _ in range(self.disturbances):
                    self.disturb(process, folder, rng, record, seen)
            self.finish(process, record, seen)
            self.compare(folder, straight, record)
            self.look_for_leftovers(record, seen)
        finally:
            if layout == "disk":
                subprocess.run(["umount", "-l", str(self.disk)], check=True)
        record.seconds = round(time.monotonic() - started, 1)
        with self.log.open("a") as log:
            log.write(json.dumps(asdict(record)) + "\n")
        return record

    def workers_of(self, process: subprocess.Popen[bytes], role: str) -> list[int]:
        return workers_of(process.pid, role)

    def wait_for_a_moment(
        self, process: subprocess.Popen[bytes], folder: Path, rng: random.Random, seen: set[int], *, loading: bool
    ) -> bool:
        """Some moment of a step, or while workers are loaded; False if the run has ended."""
        lines, wanted = count_lines(folder), rng.randint(1, 2)
        if not self.wait(process, seen, lambda: bool(self.workers_of(process, "rank"))):
            return False
        if not loading and not self.wait(process, seen, lambda: count_lines(folder) >= min(lines + wanted, self.steps)):
            return False
        time.sleep(rng.random() * (4.0 if loading else 0.4))
        return process.poll() is None

    def disturb(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        rng: random.Random,
        record: Record,
        seen: set[int],
    ) -> None:
        """Wait for a moment, send a signal to a worker, and wait until the run has reacted."""
        role = "reward worker" if rng.random() < 0.15 else "rank"
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        if not self.wait_for_a_moment(process, folder, rng, seen, loading=rng.random() < 0.15):
            return
        targets = self.workers_of(process, role)
        if not targets:
            return
        one, before, sent = Disturbance(role, number.name), len(pages_of(folder)), time.monotonic()
        try:
            os.kill(rng.choice(targets), number)
        except ProcessLookupError:
            return
        record.disturbances.append(one)
        if role == "rank":
            self.note(process, folder, one, before, sent, seen)

    def note(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        one: Disturbance,
        before: int,
        sent: float,
        seen: set[int],
    ) -> None:
        """Wait for the page of the incident, and keep what it says."""
        self.wait(process, seen, lambda: len(pages_of(folder)) > before)
        one.seconds = round(time.monotonic() - sent, 1)
        if len(pages := pages_of(folder)) > before:
            page = pages[-1].read_text()
            one.stage = page.partition("stage: ")[2].split("\n")[0]
            one.alone = "Replacement " in page
            if named := re.match(rf"# Incident {len(pages)}: (\w[\w ]* worker) \d", page):
                one.role = named[1].lower()

    def fill(
        self,
        process: subprocess.Popen[bytes],
        folder: Path,
        name: str,
        rng: random.Random,
        record: Record,
        seen: set[int],
    ) -> subprocess.Popen[bytes]:
        """Fill the run's disk; the command ends with advice, and continues once there is room again."""
        wanted = rng.randint(1, self.steps - 2)
        self.wait(process, seen, lambda: count_lines(folder) >= wanted)
        time.sleep(rng.random() * 0.4)
        filler, sent = self.disk / "filler", time.monotonic()
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], stderr=subprocess.DEVNULL)
        self.wait(process, seen, lambda: False)
        status, words = process.wait(), (self.out / f"{name}.log").read_text()
        record.disturbances.append(Disturbance("disk", "full", "", round(time.monotonic() - sent, 1)))
        if status == 0:
            record.problems.append("the full disk was not noticed")
        elif status != 2 or "No space left on device" not in words:
            record.problems.append(f"a full disk ended it with status {status}, without advice")
        filler.unlink()
        return self.start(record.layout, self.disk, name)

    def wait(self, process: subprocess.Popen[bytes], seen: set[int], until: Callable[[], bool]) -> bool:
        """False if the run has ended, or the time has."""
        end = time.monotonic() + GIVE_UP_S
        while process.poll() is None and time.monotonic() < end:
            for pid in descendants(process.pid):
                if pid not in seen:
                    seen.add(pid)
                    self.snapshots |= snapshots_of(pid)
            if until():
                return True
            time.sleep(0.1)
        return False

    def finish(self, process: subprocess.Popen[bytes], record: Record, seen: set[int]) -> None:
        self.wait(process, seen, lambda: False)
        if process.poll() is None:
            record.problems.append("it did not end in time")
            process.kill()
        record.status = process.wait()
        if record.status != 0:
            record.problems.append(f"it ended with status {record.status}")

    def compare(self, ours: Path, theirs: Path, record: Record) -> None:
        import torch

        if record.status != 0:
            return
        left, right = tensors_of(ours), tensors_of(theirs)
        differ = [name for name in right if name not in left or not torch.equal(left[name], right[name])]
        if differ or left.keys() != right.keys():
            record.problems.append(f"{len(differ)} tensors differ, e.g. {differ[:3]}")
        if metrics_of(ours) != metrics_of(theirs):
            record.problems.append("metrics.jsonl differs")

    def look_for_leftovers(self, record: Record, seen: set[int]) -> None:
        end = time.monotonic() + 30
        left: list[str] = []
        while time.monotonic() < end:
            left = [f"process {pid}" for pid in seen if is_alive(pid)]
            left += [folder for folder in self.snapshots if Path(folder).exists()]
            left += [str(path) for path in self.rays.glob("posttrain-*")]
            if not left:
                return
            time.sleep(0.2)
        record.problems.append(f"left: {', '.join(left[:5])}")


def write_reward_model(folder: Path, **shape: int) -> None:
    """An untrained classifier whose scores differ from response to response."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from posttrain.models.embedded import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1}
    config = Qwen2Config(num_hidden_layers=2, initializer_range=0.3, max_position_embeddings=512, **shape)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)


def snapshots_of(pid: int) -> set[str]:
    """Folders in shared memory that this process watches over: other runs of this machine have theirs there, too."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return set()
    return {word for word in words if word.startswith("/dev/shm/")}


def pages_of(folder: Path) -> list[Path]:
    """Of the incidents of a run, in order."""
    return sorted((folder / "incidents").glob("*.md"))


def workers_of(pid: int, role: str) -> list[int]:
    """Processes of a role below the command's."""
    found = []
    for child in descendants(pid):
        try:
            if ROLES[role] in Path(f"/proc/{child}/cmdline").read_text(errors="replace"):
                found.append(child)
        except OSError:
            continue
    return sorted(found)


if __name__ == "__main__":
    main()
