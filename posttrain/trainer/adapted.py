"""The policy of a checkpoint of LoRA adapters: its base, compared by fingerprint, with the adapters beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import Weights, fill_adapters, stored_name
from posttrain.models.identity import fingerprint
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapters


def stored_lora(manager: CheckpointManager, checkpoint: Path) -> dict[str, Any] | None:
    """What the checkpoint says of the policy's adapters and their base; None where it holds all weights."""
    return manager.load_state(checkpoint).get("lora", {}).get("actor")


def stored_adapters(manager: CheckpointManager, checkpoint: Path) -> Weights:
    """The adapters' weights alone, under their names in an adapter file; the optimizer's state stays where it is."""
    shapes = {name: kind for name, kind in manager.describe(checkpoint, "actor").items() if name.startswith("model.")}
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    manager.load_tensors(checkpoint, "actor", into, partial=True)
    return {stored_name(name.removeprefix("model.")): weight for name, weight in into.items()}


def adapted_policy(
    manager: CheckpointManager,
    checkpoint: Path,
    lora: dict[str, Any],
    base: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    advice: str = "",
) -> Any:
    """The base with the checkpoint's adapters; `advice` ends the words about a base that is gone or another one."""
    stored, settings = lora["base"], lora["adapter"]
    try:
        found = fingerprint(str(base.path))
    except (UserError, OSError) as error:
        raise CheckpointError(f"The base of the adapters in {checkpoint} was not found: {error}. {advice}") from error
    if found != stored["fingerprint"]:
        raise CheckpointError(
            f"The adapters in {checkpoint} were trained beside a base with the fingerprint {stored['fingerprint']}, "
            f"but {base.path} has {found}. {advice}"
        )
    module = load_causal_lm(base, dtype=dtype, device=device, quantization=stored["quantization"])
    shape = ModelConfig(
        lora_rank=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"]
    )
    adapted = add_adapters(module, shape, more=settings)
    fill_adapters(adapted, stored_adapters(manager, checkpoint), str(checkpoint))
    return adapted
