#!/usr/bin/env python3
"""GRPO with LoRA on a small mixture of experts, with and without adapters on the experts themselves.

    python scripts/lora_experts_runs.py OUT                # 40 steps each, a table at the end
    python scripts/lora_experts_runs.py OUT --steps 10 --seeds 1

The mixture is that of `router_replay_runs.py` (2 layers, 8 experts, 2 a token), fine-tuned until it solves half of the
withheld sums. Printed are, by run, the validation score before and after, the mean reward over the first and the last
tenth of the steps, the median seconds of a step, and the processor's seconds of this process by steps (both validations
included), which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, median
from time import process_time

from router_replay_runs import make_mixture

import posttrain
from posttrain.trainer.embedded import ensure_embedded

TARGETS = {"experts": ["experts"], "attention": "all-linear", "both": ["all-linear", "experts"]}


def train(model: Path, sums: Path, out: Path, name: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    steps = options.steps
    settings = {
        "preset": "embedded",
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.lora_rank": 16,
        "actor_rollout_ref.model.lora_alpha": 32,
        "actor_rollout_ref.model.target_modules": TARGETS[name],
        "actor_rollout_ref.actor.optim.lr": options.lr,
        "data.train_files": str(sums / "train.json"),
        "data.val_files": str(sums / "test.json"),
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        "trainer.seed": seed,
        "trainer.device": "cpu",
        "trainer.export_hf": "none",
        "trainer.default_local_dir": str(out),
        "trainer.project_name": "lora_experts",
        "trainer.experiment_name": f"{name}_{seed}",
    }
    before = process_time()
    path = posttrain.train(settings).path
    spent = process_time() - before
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    scores = [value for line in lines for key, value in line.items() if key.startswith("val/") and "mean@" in key]
    taken = [line for line in lines if "reward_mean" in line]
    some = max(1, len(taken) // 10)
    return {
        "validation, start": scores[0],
        "end": scores[-1],
        "reward, start": mean(line["reward_mean"] for line in taken[:some]),
        "reward, end": mean(line["reward_mean"] for line in taken[-some:]),
        "s/step": median(line["timing_s/step"] for line in taken),
        "processor s/step": spent / len(taken),
        "log-prob difference": max(line["mismatch/logp_max"] for line in taken),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    sums = ensure_embedded(print, model=False)
    model = make_mixture(options.out / "mixture", sums)
    found = {
        (name, seed): train(model, sums, options.out, name, seed, options)
        for seed in range(1, options.seeds + 1)
        for name in options.targets
    }
    columns = list(next(iter(found.values())))
    print("| adapters on | seed | " + " | ".join(columns) + " |")
    print("|---|---|" + "---|" * len(columns))
    for (name, seed), values in sorted(found.items()):
        print(f"| {name} | {seed} | " + " | ".join(f"{values[column]:.3g}" for column in columns) + " |")


if __name__ == "__main__":
    main()
