#!/usr/bin/env python3
"""Compares the accuracy of GRPO runs with different numbers of workers, each trained on its own samples.

    python scripts/check_worker_counts.py [--steps 60] [--seeds 3] [--workers 1 2]

After an update, samples depend on the last bit of the weights, so the runs differ; their accuracy must not. 1,000 sums
of the embedded task are held out, so the accuracy is known to 0.01. Prints a table and exits 1 if the means over the
seeds differ by more than 0.03. Takes 12 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files

METRIC = "val/math_reasoning/mean@1"
HELD_OUT = 1000
ALLOWED = 0.03


def trained(workers: int, seed: int, steps: int, data: dict[str, Path], folder: Path) -> tuple[float, float, float]:
    """(accuracy before, after, seconds) of one run in a process of its own."""
    name = f"workers_{workers}_seed_{seed}"
    keys = {
        "preset": "embedded",
        "data.train_files": data["train"],
        "data.val_files": data["test"],
        "trainer.total_training_steps": steps,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.export_hf": "none",
        "trainer.seed": seed,
        "trainer.device": "cpu",
        "trainer.n_workers": workers,
        "trainer.default_local_dir": folder,
        "trainer.experiment_name": name,
    }
    command = [sys.executable, "-m", "posttrain.trainer.main_ppo", *(f"{key}={value}" for key, value in keys.items())]
    started = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "embedded" / name / "metrics.jsonl").read_text().splitlines()
    curve = [line[METRIC] for line in map(json.loads, lines) if METRIC in line]
    return curve[0], curve[-1], time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    means: dict[int, float] = {}
    print("| workers | seed | before | after | seconds |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = arithmetic_rows(max_operand=50, val_fraction=0.45, val_size=HELD_OUT)
        data = write_files(folder / "sums", rows)
        for workers in args.workers:
            reached = []
            for seed in range(1, args.seeds + 1):
                before, after, seconds = trained(workers, seed, args.steps, data, folder / "runs")
                print(f"| {workers} | {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} |", flush=True)
                reached.append(after)
            means[workers] = sum(reached) / len(reached)
            print(f"| {workers} | mean | | {means[workers]:.4f} | |", flush=True)
    apart = max(means.values()) - min(means.values())
    print(f"The means are {apart:.4f} apart; {ALLOWED} is allowed.")
    return int(apart > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
