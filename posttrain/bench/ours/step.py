"""Whole GRPO steps by the trainer itself: `python -m posttrain.bench.ours.step JOB`; one training per request.

The clock stands around the trainer's own step, so metrics, logging and the weight sync with its proof are in it.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.bench.peers import reward
from posttrain.bench.peers.wire import serve
from posttrain.trainer.constants_ppo import apply_environment


def settings_of(job: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
    """The run's configuration. One step more than asked: the last one also saves, and is dropped."""
    return {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": job["model"],
        "actor_rollout_ref.model.dtype": job["dtype"],
        "actor_rollout_ref.rollout.name": job["engine"],
        "actor_rollout_ref.rollout.n": job["n"],
        "actor_rollout_ref.rollout.ignore_eos": job["lengths"] == "fixed",
        "actor_rollout_ref.actor.ppo_mini_batch_size": job["prompts"],
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.optim.lr": job["lr"],
        "actor_rollout_ref.actor.optim.weight_decay": job["weight_decay"],
        "data.train_batch_size": job["prompts"],
        "data.max_prompt_length": job["prompt_tokens"],
        "data.max_response_length": job["tokens"],
        "data.shuffle": False,
        "custom_reward_function.path": str(Path(reward.__file__)),
        "custom_reward_function.name": "compute_score",
        "trainer.total_training_steps": job["steps"] + 1,
        "trainer.default_local_dir": folder,
        "trainer.export_hf": "none",
        "trainer.device": job["device"],
        "trainer.seed": seed,
        "tracking.samples_freq": 0,
        **({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": job["budget"]} if job["budget"] else {}),
        **({"actor_rollout_ref.model.lora_rank": job["lora_rank"]} if job["lora_rank"] else {}),
        **({"actor_rollout_ref.model.enable_gradient_checkpointing": True} if job["checkpointing"] else {}),
        **job["settings"],
    }


def peak(lines: list[dict[str, float]]) -> float:
    """The most memory of all steps; torch's own mark is set back at every stage."""
    return max(line["perf/memory_gb"] for line in lines) * 1e9 / 2**30


def start(job: dict[str, Any]):
    import torch

    import posttrain
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    torch.set_num_threads(job["threads"])
    rows = [{"prompt": text, "ground_truth": "", "data_source": "bench"} for text in job["texts"]]
    train_step, fit = RayPPOTrainer._train_step, RayPPOTrainer.fit
    ends: list[float] = []

    def timed_fit(self: RayPPOTrainer) -> Any:
        ends[:] = [time.perf_counter()]
        return fit(self)

    def timed_step(self: RayPPOTrainer) -> None:
        train_step(self)
        ends.append(time.perf_counter())

    RayPPOTrainer._train_step, RayPPOTrainer.fit = timed_step, timed_fit

    def run(request: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="posttrain-bench-step-") as folder:
            result = posttrain.train(settings_of(job, folder, request["seed"] + 1), data=rows)
        wall = [end - before for before, end in pairwise(ends)]
        kept = result.metrics[: job["steps"]]
        return {
            "wall": wall[: job["steps"]],
            "inside": [line["timing_s/step"] for line in kept],
            "lengths": [line["response_length/mean"] for line in kept],
            "peak_gib": peak(kept) if job["device"] == "cuda" else None,
            "stages": {key: [line[key] for line in kept] for key in kept[0] if key.startswith("timing_s/")},
        }

    return settings_of(job, "", 1), run


if __name__ == "__main__":
    apply_environment()
    serve(start)
