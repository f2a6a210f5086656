#!/usr/bin/env python3
"""The curves of docs/reward_models.md: a reward model learns right from wrong sums, then PPO with a critic learns from
it. The reward model is deeper than the policy and has learnt to add: a judge should know more. With the policy's own
two layers it tells about nine pairs in ten apart, and PPO learns to please it instead of adding.

    python scripts/reward_model_curve.py [--out docs/images] [--runs outputs] [--sft_steps N] [--pairs_steps N]
        [--steps N] [--seed 1 2 3]

Every command is printed before it runs. Written to OUT: reward_model_accuracy.svg (validation accuracy by the function,
which PPO never sees) and reward_model_score.svg (the reward model's score on the same responses).
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files
from posttrain.models.embedded import write_model
from posttrain.tracking.curve import write_chart
from posttrain.tracking.loggers import read_metrics
from posttrain.trainer.embedded import RECIPE

CHARTS = {
    "reward_model_accuracy.svg": ("val/math_reasoning/mean@1", "validation accuracy"),
    "reward_model_score.svg": ("val/math_reasoning/reward_model/mean@1", "score of the reward model"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="docs/images", help="folder of the charts")
    parser.add_argument("--runs", default="outputs", help="folder of the runs")
    parser.add_argument("--sft_steps", type=int, default=400, help="steps that teach the reward model's start to add")
    parser.add_argument("--pairs_steps", type=int, default=1200, help="steps of the reward model's training")
    parser.add_argument("--steps", type=int, default=120, help="steps of PPO")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    judge = train_judge(options.runs, options.sft_steps)
    scorer = train_reward_model(options.runs, judge, options.pairs_steps)
    runs = [train_ppo(options.runs, scorer, options.steps, seed) for seed in options.seed]
    for name, (metric, title) in CHARTS.items():
        draw(Path(options.out) / name, metric, title, runs)


def train_judge(runs: str, steps: int) -> Path:
    """256 sums a step, from an untrained model of four layers, on the training sums alone."""
    name = f"judge-{steps}"
    start = write_model(Path(runs) / "curve" / "untrained", num_hidden_layers=4)
    run(
        "posttrain.trainer.fsdp_sft_trainer",
        f"data.train_files=embedded data.val_files=embedded data.train_batch_size=256 model.path={start} optim.lr=3e-3",
        f"trainer.total_training_steps={steps} trainer.test_freq=100 trainer.device=cpu",
        f"trainer.default_local_dir={runs} trainer.project_name=curve trainer.experiment_name={name}",
    )
    return Path(runs) / f"curve/{name}/checkpoints/global_step_{steps}/huggingface"


def train_reward_model(runs: str, start: Path, steps: int) -> Path:
    """128 pairs a step; gives the folder that the last checkpoint holds."""
    folder = Path(runs) / "curve" / "pairs"
    sums = arithmetic_rows(**{key: RECIPE[key] for key in ("max_operand", "val_size", "seed")})  # those of the policy
    files = write_files(folder, {name: pairs(rows) for name, rows in sums.items()})
    run(
        "posttrain.trainer.reward_model_trainer",
        f"data.train_files={files['train']} data.val_files={files['test']} data.train_batch_size=128",
        "data.val_max_samples=600",
        f"model.path={start} optim.lr=1e-3 trainer.device=cpu",
        f"trainer.total_training_steps={steps} trainer.test_freq=250",
        f"trainer.default_local_dir={runs} trainer.project_name=curve trainer.experiment_name=reward-model-{steps}",
    )
    return Path(runs) / f"curve/reward-model-{steps}/checkpoints/global_step_{steps}/huggingface"


def pairs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The right sum before wrong ones: off by one, two, ten, and by three numbers between 3 and 30."""
    draw, found = random.Random(0), []
    for row in rows:
        right = int(row["ground_truth"])
        wrong = {right + off for off in (-10, -2, -1, 1, 2, 10)}
        wrong |= {right + draw.choice((-1, 1)) * draw.randint(3, 30) for _ in range(3)}
        found += [
            {"prompt": row["prompt"], "chosen": str(right), "rejected": str(other)}
            for other in sorted(wrong)
            if other >= 0 and other != right
        ]
    return found


def train_ppo(runs: str, scorer: Path, steps: int, seed: int) -> Path:
    """100 prompts x 4 responses a step; the first 5 steps train the critic only."""
    name = f"ppo-seed-{seed}"
    run(
        "posttrain.trainer.main_ppo",
        "preset=embedded algorithm.adv_estimator=gae algorithm.lam=0.95",
        "data.train_batch_size=100 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=50",
        "actor_rollout_ref.actor.optim.lr=3e-4 critic.optim.lr=1e-3 critic.cliprange_value=1.0 trainer.critic_warmup=5",
        f"reward_model.enable=True reward_model.model.path={scorer}",
        f"trainer.total_training_steps={steps} trainer.seed={seed} trainer.device=cpu trainer.export_hf=none",
        f"trainer.default_local_dir={runs} trainer.project_name=curve trainer.experiment_name={name}",
    )
    return Path(runs) / "curve" / name


def run(module: str, *settings: str) -> None:
    command = [sys.executable, "-m", module, *shlex.split(" ".join(settings))]
    print("$ python", shlex.join(command[1:]), flush=True)
    subprocess.run(command, check=True)


def draw(path: Path, metric: str, title: str, runs: list[Path]) -> None:
    series = {}
    for folder in runs:
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if metric in line]
        series[folder.name] = ([line["step"] for line in lines], [line[metric] for line in lines])
        points = zip(*series[folder.name], strict=True)
        print(f"{title}, {folder.name}: " + " ".join(f"{step}:{value:.3f}" for step, value in points))
    write_chart(str(path), series, title=title, x_label="step", y_label=title)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
