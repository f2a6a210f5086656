"""`posttrain export`: a checkpoint as a folder that other programs load.

A checkpoint of all weights holds its Hugging Face folder, which is copied. One of LoRA adapters does not hold the base:
it is loaded from where the run found it (or from `base`), compared by its fingerprint, and the adapters are folded in;
or the adapters alone are written, which needs no base.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.export import export, free_folder
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config.model import ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import write_adapter
from posttrain.models.loading import DTYPES, load_tokenizer
from posttrain.models.lora import save_merged
from posttrain.trainer.adapted import adapted_policy, stored_adapters, stored_lora

ADVICE = "Name the base with --base FOLDER, or write the adapters alone with --adapter."


def export_checkpoint(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, adapter: bool = False, base: str | None = None
) -> Path:
    """Write the policy of `checkpoint` (`.../global_step_N`) into the new folder `out`; `adapter`: without its base."""
    source, target = Path(checkpoint), Path(out)
    manager = CheckpointManager(source.parent)
    lora = stored_lora(manager, source)
    if lora is None and (adapter or base is not None):
        what = "--adapter" if adapter else "--base"
        raise CheckpointError(f"The checkpoint {source} holds all weights and no LoRA adapters: leave out {what}.")
    if lora is None:
        return export(source, target)
    free_folder(target)
    stored = lora["base"]
    config = ModelConfig(
        path=base or stored["path"], tokenizer_path=stored["tokenizer_path"], override_config=stored["override_config"]
    )
    if adapter:
        write_adapter(target, stored_adapters(manager, source), lora["adapter"])
    else:
        place = {"dtype": DTYPES[stored["dtype"]], "device": torch.device("cpu")}
        save_merged(adapted_policy(manager, source, lora, config, **place, advice=ADVICE), target)
    _write_tokenizer(target, config)
    return target


def _write_tokenizer(target: Path, config: ModelConfig) -> None:
    try:
        load_tokenizer(config).save_pretrained(target)
    except UserError as error:
        print(f"note: {target} holds no tokenizer: {error}")
