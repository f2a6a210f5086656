"""The engine's settings from a supervised run's configuration."""

from __future__ import annotations

from typing import Any

import torch

from posttrain.engine.fsdp import EngineSettings


def engine_settings(config: Any, device: torch.device, total_steps: int) -> EngineSettings:
    """`config` is an SFTConfig or a RewardTrainerConfig."""
    return EngineSettings(
        device=device,
        optim=config.optim,
        total_steps=total_steps,
        grad_clip=config.optim.clip_grad,
        token_budget=config.data.max_token_len_per_gpu,
        max_rows=config.data.micro_batch_size_per_gpu,
        pack=config.model.use_remove_padding,
        gradient_checkpointing=config.model.enable_gradient_checkpointing,
    )
