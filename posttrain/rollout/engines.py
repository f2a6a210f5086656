"""Rollout engines by the name in `actor_rollout_ref.rollout.name`."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.hf import MODES, HFEngine
from posttrain.rollout.native.build import build_native, can_run_native
from posttrain.rollout.proof import why_wrong


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

    notes = []
    if config.name == "native":
        wrong: str | None = "it cannot answer their attention from its cache"
        if can_run_native(module):
            engine, name = build_native(module, config, decode=decode, device=device)
            wrong = why_wrong(engine, module)
            if wrong is None:
                return engine, name
        notes.append(f"native is not used for {module.config.model_type} models: {wrong}")  # pyright: ignore
    problem = None
    for mode, words in MODES.items():
        engine = HFEngine(
            module, pad_token_id=tokenizer.pad_token_id, max_num_seqs=config.max_num_seqs, decode=decode, mode=mode
        )
        problem = why_wrong(engine, module)
        if problem is None:
            notes += [words] if words else []
            return engine, "; ".join([f"hf (transformers {version('transformers')})", *notes])
    raise UserError(
        f"actor_rollout_ref.rollout.name={config.name}: no engine generates with this model as it computes "
        f"({module.config.model_type}): {problem}"  # pyright: ignore
    )
