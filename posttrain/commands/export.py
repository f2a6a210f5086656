"""`posttrain export`: a checkpoint as a folder that other programs load.

A checkpoint with the Hugging Face folder of a whole model is copied. One of LoRA adapters does not hold the base: it is
loaded from where the run found it (or from `base`), compared by its fingerprint, and the adapters are folded in; or the
adapters alone are written, which needs no base.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.export import HUGGINGFACE, export, free_folder, refuse_other_folders
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.checkpoint.verify import read_manifest
from posttrain.commands.adapted import adapted_model, stored_adapters, stored_lora
from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import write_adapter
from posttrain.models.loading import DTYPES, load_tokenizer
from posttrain.models.lora import save_merged

ADVICE = "Name the base with --base FOLDER, or write the adapters alone with --adapter."


def export_checkpoint(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, adapter: bool = False, base: str | None = None
) -> Path:
    """Write the model of `checkpoint` (`.../global_step_N`) into the new folder `out`; `adapter`: without its base."""
    source, target = Path(checkpoint), Path(out)
    refuse_other_folders(source)
    manager = CheckpointManager(source.parent)
    lora = stored_lora(manager, source)
    if lora is None and (adapter or base is not None):
        what = "--adapter" if adapter else "--base"
        raise CheckpointError(f"The checkpoint {source} holds all weights and no LoRA adapters: leave out {what}.")
    merged = f"{HUGGINGFACE}/config.json" in read_manifest(source)["files"] and not adapter and base is None
    if lora is None or merged:
        return export(source, target)
    free_folder(target)
    stored = lora["base"]
    config = ModelConfig(
        path=base or stored["path"], tokenizer_path=stored["tokenizer_path"], override_config=stored["override_config"]
    )
    tokenizer = _tokenizer(config, target)
    if adapter:
        write_adapter(target, stored_adapters(manager, source), lora["adapter"])
    else:
        place = {"dtype": DTYPES[stored["dtype"]], "device": torch.device("cpu")}
        pad = None if tokenizer is None else tokenizer.pad_token_id
        save_merged(adapted_model(manager, source, lora, config, **place, pad_token_id=pad, advice=ADVICE), target)
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    return target


def _tokenizer(config: ModelConfig, target: Path) -> Any:
    try:
        return load_tokenizer(config)
    except UserError as error:
        print(f"note: {target} will hold no tokenizer: {error}")
        return None
