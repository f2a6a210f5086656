#!/usr/bin/env python3
"""What staleness costs and gains: GRPO on the embedded task under several bounds of `trainer.max_staleness`.

    python scripts/measure_staleness.py [--steps 60] [--seeds 1 2 3] [--bounds 0 1 2 4] [--tasks plain delays]

One worker trains and one generates. `plain` answers sums, 200 prompts x 5 responses a step. With `delays` a step has 50
prompts, and every response first waits for a tool whose time is log-normal (--median seconds; one in a hundred takes
ten times as long), so that rollout is the bottleneck. 1,000 sums are held out, so that the accuracy is known to 0.01.
Prints a table: accuracy at the end, the largest staleness of any trained token, the share of rows with several
versions, and seconds. With --folder runs are kept, and those that are there already are not made again. Exits 1 if a
mean is more than 0.03 below that of the first bound, or a token is older than its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

METRIC = "val/math_reasoning/mean@1"
HELD_OUT, ALLOWED = 1000, 0.03
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


def train(task: str, bound: int, seed: int, steps: int, data: dict[str, Path], folder: Path, median_s: float) -> Result:
    """One run in processes of its own."""
    name = f"{task}_{bound}_{seed}"
    keys = {
        "preset": "embedded",
        "data.train_files": data["train"],
        "data.val_files": data["test"],
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export_hf": "none",
        "trainer.seed": seed,
        "trainer.device": "cpu",
        "actor_rollout_ref.rollout.n_workers": 1,
        "trainer.max_staleness": bound,
        "tracking.samples_freq": 0,
        "trainer.default_local_dir": folder,
        "trainer.experiment_name": name,
    }
    if task == "delays":
        keys |= {"data.train_batch_size": 50, "actor_rollout_ref.rollout.agent.processes": 2}
        keys["actor_rollout_ref.rollout.agent"] = f"{Path(__file__).resolve()}:wait_for_tool"
        keys["actor_rollout_ref.rollout.agent.config.median_s"] = median_s
    path = folder / "embedded" / name / "metrics.jsonl"
    if not path.exists() or METRIC not in path.read_text():
        arguments = [f"{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "posttrain.trainer.main_ppo", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    accuracy = next(line[METRIC] for line in reversed(lines) if METRIC in line)
    seconds = sum(line["timing_s/step"] - line.get("timing_s/validation", 0.0) for line in lines)
    ages = [line.get("rollout/age_max", 0.0) for line in lines]
    partial = [line.get("rollout/partial", 0.0) for line in lines]
    return Result(accuracy, max(ages), sum(partial) / len(partial), seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--tasks", nargs="+", choices=("plain", "delays"), default=["plain", "delays"])
    parser.add_argument("--median", type=float, default=0.1)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    failed = False
    print("| task | bound | seed | accuracy | oldest token | partial rows | seconds |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        data = write_files(folder / "sums", arithmetic_rows(max_operand=50, val_fraction=0.45, val_size=HELD_OUT))
        for task in args.tasks:
            means: dict[int, float] = {}
            for bound in args.bounds:
                made = []
                for seed in args.seeds:
                    made.append(one := train(task, bound, seed, args.steps, data, folder / "runs", args.median))
                    cells = f"{one.accuracy:.3f} | {one.oldest:.0f} | {one.partial:.2f} | {one.train_s:.0f}"
                    print(f"| {task} | {bound} | {seed} | {cells} |", flush=True)
                    failed |= one.oldest > bound
                means[bound] = sum(one.accuracy for one in made) / len(made)
                seconds = sum(one.train_s for one in made) / len(made)
                print(f"| {task} | {bound} | mean | {means[bound]:.3f} | | | {seconds:.0f} |", flush=True)
            failed |= min(means.values()) < means[args.bounds[0]] - ALLOWED
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
