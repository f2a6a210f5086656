"""Rollout engines by the name in `actor_rollout_ref.rollout.name`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.hf import HFEngine


def build_engine(config: RolloutConfig, module: torch.nn.Module, tokenizer: Any) -> tuple[RolloutEngine, str]:
    """(the engine, its name and version). On one process `hf` reads the trainer's own module."""
    if config.name != "hf":
        raise UserError(
            f"actor_rollout_ref.rollout.name={config.name}: this engine is not built in this version; "
            "set actor_rollout_ref.rollout.name=hf"
        )
    engine = HFEngine(
        module,
        pad_token_id=tokenizer.pad_token_id,
        max_num_seqs=config.max_num_seqs,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )
    return engine, f"hf (transformers {version('transformers')})"
