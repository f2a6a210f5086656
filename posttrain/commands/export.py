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

from posttrain.checkpoint.folders import (
    HUGGINGFACE,
    CheckpointError,
    export,
    free_folder,
    read_manifest,
    refuse_other_folders,
)
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.config.model import SCORE_HEADS, ModelConfig
from posttrain.errors import UserError
from posttrain.models.adapter_files import SCORER, Weights, fill_adapters, fingerprint, stored_name, write_adapter
from posttrain.models.loading import DTYPES, load_causal_lm, load_tokenizer
from posttrain.models.lora import add_adapters, save_merged
from posttrain.models.scorer_loading import load_scorer

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
    # Only the merged model needs its base: adapters alone are exported where the base no longer exists.
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
    # Adapters beside another base load without an error and give nonsense, so the base is compared first.
    if found != stored["fingerprint"]:
        raise CheckpointError(
            f"The adapters in {checkpoint} were trained beside a base with the fingerprint {stored['fingerprint']}, "
            f"but {base.path} has {found}. {advice}"
        )
    # A reward model's head is trained whole beside the adapters, so it is rebuilt here and filled from their file.
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
    adapted = add_adapters(module, shape, more=settings, source=str(checkpoint), whole=SCORE_HEADS if scores else ())
    fill_adapters(adapted, stored_adapters(manager, checkpoint), str(checkpoint))
    return adapted
