"""Rollout engines by the name in `actor_rollout_ref.rollout.name`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.native.build import build_native, can_run_native


def build_engine(
    config: RolloutConfig, module: torch.nn.Module, tokenizer: Any, *, device: torch.device | None = None
) -> tuple[RolloutEngine, str]:
    """(the engine, its name and version). On one process it reads the trainer's own weights, wherever these are moved;
    `device` is where they are while it works."""
    if config.name not in ("native", "hf"):
        raise UserError(
            f"actor_rollout_ref.rollout.name={config.name}: this engine is not built in this version; "
            "set actor_rollout_ref.rollout.name=native"
        )

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    if config.name == "native" and can_run_native(module):
        return build_native(module, config, decode=decode, device=device)
    engine = HFEngine(module, pad_token_id=tokenizer.pad_token_id, max_num_seqs=config.max_num_seqs, decode=decode)
    name = f"hf (transformers {version('transformers')})"
    if config.name == "native":
        kind = module.config.model_type  # pyright: ignore
        name += f"; native cannot answer the attention of {kind} models from its cache"
    return engine, name
