"""Whole GRPO steps by the trainer itself, and the policy's update alone: `python -m posttrain.bench.ours.training JOB
step|train`; one training or one update per request.

The time of a step is taken around the trainer's own step, so metrics, logging and the verified weight sync are in it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.bench.peers import wire
from posttrain.bench.peers.wire import serve, time_call
from posttrain.trainer.constants_ppo import apply_environment


def settings_of(job: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
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
        # The peers train on the same prompts in the same order.
        "data.shuffle": False,
        "custom_reward_function.path": str(Path(wire.__file__)),
        "custom_reward_function.name": "compute_score",
        "trainer.total_training_steps": job["steps"],
        "trainer.default_local_dir": folder,
        # Only the steps are compared; what a run writes at its end is not.
        "trainer.export_hf": "none",
        "trainer.device": job["device"],
        "trainer.seed": seed,
        "tracking.samples_freq": 0,  # peers write no samples
        **({"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": job["budget"]} if job["budget"] else {}),
        **({"actor_rollout_ref.model.lora_rank": job["lora_rank"]} if job["lora_rank"] else {}),
        **({"actor_rollout_ref.model.enable_gradient_checkpointing": True} if job["checkpointing"] else {}),
        **job["settings"],
    }


def peak(lines: list[dict[str, float]]) -> float:
    """The most memory of all steps; torch's own mark is set back at every stage."""
    return max(line["perf/memory_gb"] for line in lines) * 1e9 / 2**30


def step(job: dict[str, Any]):
    import torch

    import posttrain
    from posttrain.trainer.ppo.ray_trainer import RayPPOTrainer

    torch.set_num_threads(job["threads"])
    rows = [{"prompt": text, "ground_truth": "", "data_source": "bench"} for text in job["texts"]]
    # The trainer is timed from outside, by replacing two methods, so that it needs no hooks for a bench.
    train_step, fit = RayPPOTrainer._train_step, RayPPOTrainer.fit
    ends: list[float] = []

    def timed_fit(self: RayPPOTrainer) -> Any:
        ends[:] = [time.perf_counter()]
        return fit(self)

    def timed_step(self: RayPPOTrainer) -> None:
        train_step(self)
        ends.append(time.perf_counter())

    RayPPOTrainer._train_step, RayPPOTrainer.fit = timed_step, timed_fit
    RayPPOTrainer._save_checkpoint = lambda self: self.run.path  # no peer saves one in its steps

    def run(request: dict[str, Any]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="posttrain-bench-step-") as folder:
            result = posttrain.train(settings_of(job, folder, request["seed"] + 1), data=rows)
        wall = [end - before for before, end in pairwise(ends)]
        kept = result.metrics
        return {
            "wall": wall,
            "inside": [line["timing_s/step"] for line in kept],
            "lengths": [line["response_length/mean"] for line in kept],
            "peak_gib": peak(kept) if job["device"] == "cuda" else None,
            "stages": {key: [line[key] for line in kept] for key in kept[0] if key.startswith("timing_s/")},
        }

    return settings_of(job, "", 1), run


def train(job: dict[str, Any]):
    """The update as a run makes it."""
    import numpy as np
    import torch

    from posttrain.config.model import ModelConfig
    from posttrain.config.root import ActorConfig, OptimConfig, RolloutCorrectionConfig
    from posttrain.engine.base import EngineSettings
    from posttrain.engine.micro_batches import plan_passes
    from posttrain.engine.torch_engine import TorchEngine
    from posttrain.models.loading import DTYPES, load_causal_lm
    from posttrain.models.lora import with_adapters
    from posttrain.rollout.base import Output
    from posttrain.rollout.generate import to_batch
    from posttrain.workers.actor.dp_actor import ActorObjective

    torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    # `--set native:actor.quantization=fp8` is the actor's; other settings are the model's.
    given = dict(job["settings"])
    actor = ActorConfig(loss_agg_mode="seq-mean-token-mean", quantization=given.pop("actor.quantization", None))
    config = ModelConfig(path=job["model"], lora_rank=job["lora_rank"], **given)
    module = load_causal_lm(config, dtype=DTYPES[job["dtype"]], device=device)
    if config.lora_rank:
        module = with_adapters(module, config)
    settings = EngineSettings(
        device=device,
        optim=OptimConfig(lr=1e-5, weight_decay=0.0),
        token_budget=job["budget"],
        gradient_checkpointing=job["checkpointing"],
        fp8=actor.quantization == "fp8",
    )
    engine = TorchEngine(module, settings)
    outputs = [Output(row, ids, [-1.0] * len(ids), "length") for row, ids in enumerate(job["responses"])]
    batch = to_batch(job["prompts"], outputs, pad_token_id=0)
    uids = [str(row // job["n"]) for row in range(len(outputs))]
    batch.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    generator = torch.Generator().manual_seed(0)  # the same advantages as `peers/run_transformers.py`
    mask_BR = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.randn(len(outputs), 1, generator=generator) * mask_BR
    objective = ActorObjective(actor, RolloutCorrectionConfig(), float(mask_BR.shape[1]))
    # Packing depends on lengths alone, which do not change: it is done once, as the peer pads once.
    passes = plan_passes(batch, engine.facts())
    computed = sum(unit.tokens for units in passes for unit in units)

    def update() -> None:
        prepared = objective.prepare(batch.select())
        engine.update(prepared, objective, passes=passes)
        if device.type == "cuda":
            # Kernels are queued: without this the clock would stop before the device does.
            torch.cuda.synchronize()

    def run(request: dict[str, Any]) -> dict[str, Any]:
        seconds, _ = time_call(update)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
        return {"seconds": seconds, "computed": computed, "passes": len(passes), "peak_gib": peak}

    return {"token_budget": job["budget"], "trained": engine.facts().trained}, run


if __name__ == "__main__":
    apply_environment()
    serve({"step": step, "train": train}[sys.argv[2]])
