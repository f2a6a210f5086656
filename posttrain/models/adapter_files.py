"""Adapters as peft stores them: `adapter_config.json` and `adapter_model.safetensors`, never a pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from posttrain.models.adapter_targets import AdapterError

Weights = dict[str, torch.Tensor]
SCORER = "SEQ_CLS"
"""peft's kind of task of an adapter beside a sequence classifier."""
_NAME = ".default"  # peft's name for the one adapter of a model; its files leave it out


def stored_name(parameter: str) -> str:
    """The name in an adapter file of a parameter of a model with adapters."""
    return parameter.replace(_NAME, "")


def adapter_parameters(model: torch.nn.Module) -> Weights:
    """The adapters' live tensors under their names in an adapter file."""
    return {stored_name(name): weight for name, weight in model.named_parameters() if ".lora_" in name}


def whole_modules(model: Any) -> dict[str, torch.nn.Module]:
    """Top modules that are trained whole beside the adapters: the head of a reward model."""
    tops = model.get_base_model().named_children()
    return {
        name: part
        for name, part in tops
        if any(weight.requires_grad and "lora_" not in inner for inner, weight in part.named_parameters())
    }


def trained_parameters(model: Any) -> Weights:
    """The adapters' live tensors and those of the modules trained whole, under their names in an adapter file."""
    heads = tuple(f"base_model.model.{name}." for name in whole_modules(model))
    kept = {
        name: weight for name, weight in model.named_parameters() if name.startswith(heads) and ".lora_" not in name
    }
    return adapter_parameters(model) | kept


def adapter_settings(model: Any, base: str) -> dict[str, Any]:
    """What `adapter_config.json` says of this model's adapters: plain JSON, in a fixed order."""
    settings = model.peft_config["default"].to_dict() | {"inference_mode": True, "base_model_name_or_path": base}
    if heads := sorted(whole_modules(model)):
        settings |= {"modules_to_save": heads, "task_type": SCORER}
    ordered = {name: settings[name] for name in sorted(settings)}
    return json.loads(
        json.dumps(ordered, default=lambda value: sorted(value) if isinstance(value, set) else str(value))
    )


def write_adapter(folder: Path, weights: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    """A folder that `PeftModel.from_pretrained` and `model.lora_adapter_path` take."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(kept, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(dict(settings), indent=2) + "\n")


def read_adapter(folder: Path, heads: Sequence[str] = ()) -> tuple[dict[str, Any], Weights]:
    """(settings, weights) of an adapter folder, which may hold `heads` whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    settings = read_adapter_config(folder, heads)
    if isinstance(settings, str):
        raise AdapterError(f"model.lora_adapter_path: {settings}")
    try:
        return settings, load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error


@torch.no_grad()
def fill_adapters(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy stored adapters into the model's; every tensor must be there with its shape, and no others.

    A module that is trained whole beside them (the head of a reward model) is filled where it is stored.
    """
    adapters = adapter_parameters(model)
    own = {name: weight for name, weight in trained_parameters(model).items() if name in adapters or name in weights}
    problems = [f"{name} is missing" for name in own if name not in weights]
    problems += [f"{name} belongs to no adapter of this model" for name in weights if name not in own]
    problems += [
        f"{name} is {tuple(weights[name].shape)} there and {tuple(own[name].shape)} here"
        for name in own
        if name in weights and weights[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise AdapterError(
            f"The adapter {source} does not fit this model: {'; '.join(problems[:4])}{more}. "
            "It was made for another base: set model.path to that one."
        )
    for name, weight in own.items():
        weight.copy_(weights[name])
