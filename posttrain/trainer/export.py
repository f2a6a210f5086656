"""`posttrain export`: a checkpoint as a folder that other programs load.

A checkpoint of all weights holds its Hugging Face folder, which is copied. One of LoRA adapters does not hold the base:
it is loaded from where the run found it (or from `base`), compared by its fingerprint, and the adapters are folded in;
or the adapters alone are written, which needs no base.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.export import export, free_folder
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import Weights, fill_adapters, stored_name, write_adapter
from posttrain.models.identity import fingerprint
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.lora import add_adapters, save_merged


def export_checkpoint(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, adapter: bool = False, base: str | None = None
) -> Path:
    """Write the policy of `checkpoint` (`.../global_step_N`) into the new folder `out`; `adapter`: without its base."""
    source, target = Path(checkpoint), Path(out)
    manager = CheckpointManager(source.parent)
    lora = manager.load_state(source).get("lora", {}).get("actor")
    if lora is None and (adapter or base is not None):
        what = "--adapter" if adapter else "--base"
        raise CheckpointError(f"The checkpoint {source} holds all weights and no LoRA adapters: leave out {what}.")
    if lora is None:
        return export(source, target)
    free_folder(target)
    config = _base_config(lora["base"], base)
    if adapter:
        write_adapter(target, _adapters(manager, source), lora["adapter"])
    else:
        _write_merged(target, _adapters(manager, source), lora, config, source)
    _write_tokenizer(target, config)
    return target


def _base_config(stored: dict[str, Any], base: str | None) -> ModelConfig:
    return ModelConfig(
        path=base or stored["path"],
        tokenizer_path=stored["tokenizer_path"],
        override_config=stored["override_config"],
    )


def _adapters(manager: CheckpointManager, source: Path) -> Weights:
    """The adapters' weights alone; the optimizer's state stays where it is."""
    shapes = {name: kind for name, kind in manager.describe(source, "actor").items() if name.startswith("model.")}
    into = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    manager.load_tensors(source, "actor", into, partial=True)
    return {stored_name(name.removeprefix("model.")): weight for name, weight in into.items()}


def _write_merged(target: Path, weights: Weights, lora: dict[str, Any], config: ModelConfig, source: Path) -> None:
    stored, settings = lora["base"], lora["adapter"]
    advice = "Name the base with --base FOLDER, or write the adapters alone with --adapter."
    try:
        found = fingerprint(str(config.path))
    except (UserError, OSError) as error:
        raise CheckpointError(f"The base of the adapters in {source} was not found: {error}. {advice}") from error
    if found != stored["fingerprint"]:
        raise CheckpointError(
            f"The adapters in {source} were trained beside a base with the fingerprint {stored['fingerprint']}, but "
            f"{config.path} has {found}. {advice}"
        )
    cpu, dtype = torch.device("cpu"), DTYPES[stored["dtype"]]
    module = load_causal_lm(config, dtype=dtype, device=cpu, quantization=stored["quantization"])
    shape = ModelConfig(
        lora_rank=settings["r"], lora_alpha=settings["lora_alpha"], target_modules=settings["target_modules"]
    )
    adapted = add_adapters(module, shape, more=settings)
    fill_adapters(adapted, weights, str(source))
    save_merged(adapted, target)


def _write_tokenizer(target: Path, config: ModelConfig) -> None:
    try:
        load_tokenizer(config).save_pretrained(target)
    except UserError as error:
        print(f"note: {target} holds no tokenizer: {error}")
