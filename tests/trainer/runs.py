"""Small runs in this process: a tiny untrained model, a few steps, a reward that has something to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from light_rewards import even_share as parity_reward

import posttrain
from posttrain.trainer.run.result import RunResult

TIMES = ("time", "timing_", "perf/")


def settings(model: Path, data: dict[str, Path], out: Path, **more: Any) -> dict[str, Any]:
    """A run of 2 steps of 4 prompts x 3 responses; `more` holds dotted keys with __ for the dots."""
    base: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "data.train_files": str(data["train"]),
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "trainer.total_training_steps": 2,
        "trainer.device": "cpu",
        "trainer.default_local_dir": str(out),
        "trainer.project_name": "test",
        "trainer.experiment_name": "run",
        "trainer.export_hf": "none",
        "reward.num_workers": 1,
    }
    return base | {key.replace("__", "."): value for key, value in more.items()}


def run(model: Path, data: dict[str, Path], out: Path, *, reward: Any = parity_reward, **more: Any) -> RunResult:
    return posttrain.train(settings(model, data, out, **more), reward=reward)


def metrics_of(path: Path, *, times: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; without `times` what a clock decides is left out."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if times or not k.startswith(TIMES)} for line in lines]
