"""The model of a checkpoint of LoRA adapters: its base, compared by fingerprint, with the adapters beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config.lora import SCORE_HEADS
from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import SCORER, Weights, fill_adapters, fingerprint, stored_name
from posttrain.models.loading import load_causal_lm
from posttrain.models.lora import add_adapters
from posttrain.models.scorer_loading import load_scorer


def stored_lora(manager: CheckpointManager, checkpoint: Path) -> dict[str, Any] | None:
    """What the checkpoint says of the trained model's adapters and their base; None where it holds all weights."""
    role = _role(manager, checkpoint)
    return manager.load_state(checkpoint)["lora"][role] if role else None


def _role(manager: CheckpointManager, checkpoint: Path) -> str | None:
    """`actor` of RL, `model` of a supervised run."""
    stored = manager.load_state(checkpoint).get("lora", {})
    return next((role for role in ("actor", "model") if role in stored), None)


def stored_adapters(manager: CheckpointManager, checkpoint: Path) -> Weights:
    """The trained weights alone, under their names in an adapter file; the optimizer's state stays where it is."""
    role = _role(manager, checkpoint)
    assert role is not None, "the caller has seen adapters in it"
    shapes = {name: kind for name, kind in manager.describe(checkpoint, role).items() if name.startswith("model.")}
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    manager.load_tensors(checkpoint, role, into, partial=True)
    return {stored_name(name.removeprefix("model.")): weight for name, weight in into.items()}


def adapted_model(
    manager: CheckpointManager,
    checkpoint: Path,
    lora: dict[str, Any],
    base: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pad_token_id: int | None = None,
    advice: str = "",
) -> Any:
    """The base with the checkpoint's adapters; `advice` ends the words about a base that is gone or another one.

    A reward model's base gets its head of them too; `pad_token_id` serves one whose configuration has none.
    """
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
    scores = settings["task_type"] == SCORER
    if scores:
        module = load_scorer(
            str(base.path),
            device,
            dtype,
            pad_token_id=pad_token_id,
            override_config=base.override_config,
            new_head=True,
            quantization=stored["quantization"],
        )
    else:
        module = load_causal_lm(base, dtype=dtype, device=device, quantization=stored["quantization"])
    shape = ModelConfig(
        lora_rank=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"]
    )
    adapted = add_adapters(module, shape, more=settings, whole=SCORE_HEADS if scores else ())
    fill_adapters(adapted, stored_adapters(manager, checkpoint), str(checkpoint))
    return adapted
