"""What a checkpoint of adapters says of them and of their base, and the check that both are the same again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.config import needs_reference
from posttrain.config.engine_kwargs import OUTSIDE
from posttrain.config.lora import ADAPTER_CONFIG
from posttrain.config.model import ModelConfig
from posttrain.config.root import PPOConfig
from posttrain.engine.facts import EngineFacts
from posttrain.models.adapter_targets import stacked_note
from posttrain.models.identity import fingerprint


def lora_state(facts: EngineFacts, model: ModelConfig, path: str | None = None) -> dict[str, Any] | None:
    """The policy's adapter settings and the identity of the base, as plain JSON; None for a model without adapters."""
    if facts.adapters is None:
        return None
    base = path or str(model.path)
    dtype = str(facts.dtype).removeprefix("torch.")
    shape = {"adapter": facts.adapters | {"base_model_name_or_path": base}} if facts.adapters else {}
    return shape | {
        "base": {
            "path": base,
            "fingerprint": fingerprint(base),
            "dtype": dtype,
            "quantization": model.quantization,
            "override_config": model.override_config,
            "tokenizer_path": model.tokenizer_path,
        },
    }


def base_problem(stored: Mapping[str, Any], present: Mapping[str, Any] | None, section: str) -> str | None:
    """Why adapters that were `stored` beside a base must not go on beside the one that is there now.

    `section` holds the settings of their model.
    """
    if present is None:
        return f"it holds LoRA adapters only, and this run trains all weights: set {section}.lora_rank"
    was, now = stored["base"], present["base"]
    if was["fingerprint"] != now["fingerprint"]:
        return (
            f"its adapters were trained beside the base {was['path']} (fingerprint {was['fingerprint']}), but the base "
            f"of this run, {now['path']}, has other weights (fingerprint {now['fingerprint']})"
        )
    for name in ("dtype", "quantization"):
        if was[name] != now[name]:
            return f"its base was held with model.{name}={was[name]}, but this run holds it with {now[name]}"
    return None


def adapter_notes(facts: EngineFacts, model: ModelConfig) -> list[str]:
    """What a user of adapters should know about them: another base than theirs, weights that get none."""
    notes = [note for note in [stacked_note(facts.stacked, model, "model.target_modules")] if note]
    if model.quantization is not None and facts.stacked:
        notes.append(
            f"model.quantization={model.quantization} holds linear modules in 4 bits; {facts.stacked} keep model.dtype."
        )
    if model.lora_adapter_path is not None:
        made_for = json.loads((Path(model.lora_adapter_path) / ADAPTER_CONFIG).read_bytes()).get(
            "base_model_name_or_path"
        )
        if made_for and not _same_place(made_for, str(model.path)):
            notes.append(
                f"The adapter in {model.lora_adapter_path} was made beside {made_for}; here its base is {model.path}."
            )
    return notes


def policy_notes(config: PPOConfig, engine: str) -> list[str]:
    """What the adapters of a policy mean for its reference and its rollout."""
    model, notes = config.actor_rollout_ref.model, []
    if model.lora_adapter_path is not None and needs_reference(config):
        notes.append("The reference is the base without the adapter that the run starts from: KL does not begin at 0.")
    if model.quantization is not None:
        held = f"The base is held in 4 bits (model.quantization={model.quantization})"
        if (outside := OUTSIDE.get(engine.partition(" ")[0])) is not None:
            notes.append(f"{held}; {outside.title} has it unpacked, with the adapters folded in.")
        else:
            notes.append(
                f"{held}, which the fused decoder does not read: the rollout goes through the model's own layers "
                f"({engine})."
            )
    return notes


def _same_place(one: str, other: str) -> bool:
    return one == other or (Path(one).is_dir() and Path(other).is_dir() and Path(one).samefile(other))
