#!/usr/bin/env python3
"""What staleness costs and gains: GRPO on the embedded task under several bounds of `trainer.max_staleness`.

    python scripts/measure_staleness.py [--steps 60] [--seeds 1 2 3] [--bounds 0 1 2 4] [--tasks plain delays]
        [--set KEY=VALUE ...]

One worker trains and one generates. `plain` answers sums, 200 prompts x 5 responses a step. With `delays` a step has 50
prompts, and every response first waits for a tool whose time is log-normal (--median seconds; one in a hundred takes
ten times as long), so that rollout is the bottleneck. 1,000 sums are held out, so that the accuracy is known to 0.01.
Prints a table: accuracy at the end, the largest staleness of any trained token, the share of rows with several
versions, and seconds. --set gives all runs further settings, such as trainer.partial_rollout=True. With --folder runs
are kept, and those that are there already are not made again. Exits 1 if a mean is more than 0.03 below that of the
first bound, or a token is older than its bound. --drill kills a run with delays (bound 2) by SIGKILL, resumes and
replays it; it exits 1 if a prompt is lost or trained twice, or the replay differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

METRIC = "val/math_reasoning/mean@1"
HELD_OUT, ALLOWED = 1000, 0.03
PROMPTS = 50  # of a step with delays
SIGMA = 1.0


async def wait_for_tool(chat: Any, row: dict[str, Any], *, median_s: float = 0.1) -> None:
    """The agent of `delays`: a tool that takes its time, then the answer. The delay depends on the sample alone."""
    delay = random.Random(f"{row['uid']} {row['sample']}").lognormvariate(0.0, SIGMA)
    await asyncio.sleep(median_s * delay)
    await chat.say()


class Result(NamedTuple):
    """Of one run."""

    accuracy: float
    oldest: float  # staleness of the oldest token that was trained
    partial: float  # share of rows that several versions sampled
    train_s: float  # of all steps, without start and validation


class Task(NamedTuple):
    """What all runs have in common."""

    name: str
    steps: int
    data: dict[str, Path]
    folder: Path
    median_s: float
    more: tuple[str, ...] = ()  # settings

    def command(self, run: str, bound: int, seed: int, **more: Any) -> list[str]:
        """Of one run in processes of its own; `more` are settings of `trainer`."""
        keys = {
            "preset": "embedded",
            "data.train_files": self.data["train"],
            "data.val_files": self.data["test"],
            "actor_rollout_ref.rollout.n_workers": 1,
            "tracking.samples_freq": 0,
        }
        trainer = {
            "total_training_steps": self.steps,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
            "export_hf": "none",
            "seed": seed,
            "device": "cpu",
            "max_staleness": bound,
            "default_local_dir": self.folder,
            "experiment_name": run,
        }
        if self.name == "delays":
            keys |= {"data.train_batch_size": PROMPTS, "actor_rollout_ref.rollout.agent.processes": 2}
            keys["actor_rollout_ref.rollout.agent"] = f"{Path(__file__).resolve()}:wait_for_tool"
            keys["actor_rollout_ref.rollout.agent.config.median_s"] = self.median_s
        keys |= {f"trainer.{key}": value for key, value in {**trainer, **more}.items()}
        settings = [*(f"{key}={value}" for key, value in keys.items()), *self.more]
        return [sys.executable, "-m", "posttrain.trainer.main_ppo", *settings]

    def lines(self, run: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.folder / "embedded" / run / file
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(task: Task, bound: int, seed: int) -> Result:
    """One run, unless it is there already."""
    name = "_".join([task.name, str(bound), str(seed), *task.more]).replace("=", "-").replace("/", "-")
    if not any(METRIC in line for line in task.lines(name)):
        subprocess.run(task.command(name, bound, seed), check=True, stdout=subprocess.DEVNULL)
    lines = task.lines(name)
    accuracy = next(line[METRIC] for line in reversed(lines) if METRIC in line)
    seconds = sum(line["timing_s/step"] - line.get("timing_s/validation", 0.0) for line in lines)
    ages = [line.get("rollout/age_max", 0.0) for line in lines]
    partial = [line.get("rollout/partial", 0.0) for line in lines]
    return Result(accuracy, max(ages), sum(partial) / len(partial), seconds)


def drill(task: Task) -> bool:
    """Whether a killed run loses no prompt and trains none twice, and a replay repeats a run bit for bit."""
    saves = {"save_freq": 3}
    command = task.command("killed", 2, 1, **saves)
    if task.lines("killed"):
        raise SystemExit(f"{task.folder} holds a drill already: give another --folder.")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(task.lines("killed")) < task.steps - 3:
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"The run ended with exit code {process.returncode} before it could be killed.")
    process.kill()
    process.wait()
    before = len(task.lines("killed"))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    trained = [int(uid) for line in task.lines("killed", "events.jsonl") for uid in line.get("take", ())]
    once = sorted(trained) == list(range(task.steps * PROMPTS))
    mixed = max(line["rollout/partial"] for line in task.lines("killed"))
    print(f"killed behind step {before}, resumed: {len(trained)} groups trained, each once and none lost: {once}; "
          f"up to {mixed:.0%} of a step's rows have several versions", flush=True)  # fmt: skip
    log = {"replay_events": task.folder / "embedded" / "killed" / "events.jsonl"}
    subprocess.run(task.command("replayed", 2, 1, **saves, **log), check=True, stdout=subprocess.DEVNULL)
    runs = [[_without_times(line) for line in task.lines(name)] for name in ("killed", "replayed")]
    sums = [[line for line in task.lines(name, "events.jsonl") if "weights" in line] for name in ("killed", "replayed")]
    repeated = runs[0] == runs[1] and sums[0] == sums[1]
    print(f"replayed from its log: metrics of {len(runs[1])} steps and checksums of the weights equal: {repeated}")
    for one, other in zip(*runs, strict=False):
        if differ := {key: (one[key], other.get(key)) for key in one if one[key] != other.get(key)}:
            print(f"step {one['step']}: {differ}")
    return once and repeated and mixed > 0


def _without_times(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if not key.startswith(("time", "timing_", "perf/", "tools/"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--tasks", nargs="+", choices=("plain", "delays"), default=["plain", "delays"])
    parser.add_argument("--median", type=float, default=0.1)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--drill", action="store_true", help="kill, resume and replay a run instead")
    args = parser.parse_args()
    failed = False
    if args.drill:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            data = write_files(folder / "sums", arithmetic_rows(max_operand=50, val_fraction=0.45, val_size=100))
            return int(not drill(Task("delays", args.steps, data, args.folder or folder, args.median, tuple(args.set))))
    print("| task | bound | seed | accuracy | oldest token | partial rows | seconds |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        data = write_files(folder / "sums", arithmetic_rows(max_operand=50, val_fraction=0.45, val_size=HELD_OUT))
        for name in args.tasks:
            task = Task(name, args.steps, data, folder / "runs", args.median, tuple(args.set))
            means: dict[int, float] = {}
            for bound in args.bounds:
                made = []
                for seed in args.seeds:
                    made.append(one := train(task, bound, seed))
                    cells = f"{one.accuracy:.3f} | {one.oldest:.0f} | {one.partial:.2f} | {one.train_s:.0f}"
                    print(f"| {name} | {bound} | {seed} | {cells} |", flush=True)
                    failed |= one.oldest > bound
                means[bound] = sum(one.accuracy for one in made) / len(made)
                seconds = sum(one.train_s for one in made) / len(made)
                print(f"| {name} | {bound} | mean | {means[bound]:.3f} | | | {seconds:.0f} |", flush=True)
            failed |= min(means.values()) < means[args.bounds[0]] - ALLOWED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
