"""What the tests of this folder share: workers from dotted settings, batches, the rates of a schedule written out."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from engine_tools import ragged_batch

from posttrain.config.root import PPOConfig
from posttrain.config.schema import assign
from posttrain.controller.pool import LocalWorkerGroup
from posttrain.models.loading import load_tokenizer
from posttrain.protocol import DataProto
from posttrain.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

CPU = torch.device("cpu")
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
TEMPERATURE = 0.7
OPTIM: dict[str, Any] = {  # far from the defaults: one that is ignored changes the weights visibly
    "lr": 2e-2,
    "betas": [0.6, 0.7],
    "eps": 3e-3,
    "weight_decay": 0.4,
    "lr_warmup_steps_ratio": 0.5,
    "lr_scheduler_type": "cosine",
    "min_lr_ratio": 0.2,
}
CLIP = 0.05


def rates(total: int) -> list[float]:
    """The learning rates of `OPTIM` over `total` updates."""
    warmup, low = total // 2, OPTIM["min_lr_ratio"]
    rising = [(step + 1) / warmup for step in range(warmup)]
    falling = [
        low + (1 - low) * (1 + math.cos(math.pi * step / (total - warmup))) / 2 for step in range(total - warmup)
    ]
    return [OPTIM["lr"] * share for share in rising + falling]


def ppo_config(model: Path, settings: dict[str, Any]) -> PPOConfig:
    """Two responses per prompt, float64, temperature 0.7, and these settings."""
    config = PPOConfig()
    base: dict[str, Any] = {
        f"{MODEL}.path": str(model),
        f"{MODEL}.dtype": "float64",
        f"{ROLLOUT}.n": 2,
        f"{ROLLOUT}.temperature": TEMPERATURE,
        f"{ACTOR}.ppo_mini_batch_size": 4,
        "data.max_response_length": 12,
    }
    for key, value in {**base, **settings}.items():
        assign(config, key, value)
    return config


def actor(model: Path, settings: dict[str, Any] | None = None, **named: Any) -> LocalWorkerGroup:
    config = ppo_config(model, settings or {})
    group = LocalWorkerGroup(
        ActorRolloutRefWorker(config, load_tokenizer(config.actor_rollout_ref.model), CPU, **named)
    )
    group.init_model()
    return group


def critic(model: Path, settings: dict[str, Any] | None = None, **named: Any) -> LocalWorkerGroup:
    group = LocalWorkerGroup(CriticWorker(ppo_config(model, settings or {}), CPU, **named))
    group.init_model()
    return group


def batch() -> DataProto:
    """16 ragged rows, two to a prompt, with everything that an update of actor or critic reads."""
    data = ragged_batch(prompts=8)
    generator = torch.Generator().manual_seed(3)
    for name in ("values", "returns"):
        data.batch[name] = torch.randn(data.batch["responses"].shape, generator=generator, dtype=torch.float64)
    data.meta_info["step"] = 1
    return data
