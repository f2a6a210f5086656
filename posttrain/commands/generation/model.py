"""The model that a command names: a folder, a hub id, `embedded`, or a checkpoint of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.checkpoint.verify import HUGGINGFACE, read_manifest, refuse_run, verify
from posttrain.commands.export import adapted_model, stored_lora
from posttrain.commands.generation.settings import Settings, find_run_of, is_checkpoint
from posttrain.config.model import ModelConfig
from posttrain.errors import first_line
from posttrain.models.loading import ModelError, load_causal_lm, load_tokenizer, local_or_hub, resolve_dtype
from posttrain.trainer.embedded import ensure_embedded

MOST_TOKENS = 1024  # of a response where nothing is set


@dataclass
class ModelSource:
    """Where weights and tokenizer come from."""

    name: str  # as the user wrote it
    config: ModelConfig
    checkpoint: Path | None = None  # a checkpoint whose tensors are laid over the model of `config`

    def described(self) -> dict[str, Any]:
        """Which weights these are: the path, and sizes and times of local files."""
        folder = self.checkpoint or Path(str(self.config.path))
        files = sorted(folder.rglob("*")) if folder.is_dir() else []
        weights = [file for file in files if file.suffix in (".safetensors", ".bin", ".distcp")]
        stats = [(str(file.relative_to(folder)), file.stat()) for file in weights]
        path = str(folder.resolve()) if folder.is_dir() else str(self.config.path)
        return {"path": path, "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def find_model(name: str, settings: Settings, say: Any) -> ModelSource:
    """The source that MODEL names; nothing is loaded yet, but a checkpoint's files are verified."""
    model = settings.config.actor_rollout_ref.model
    if name == "embedded":
        return ModelSource(name, replace(model, path=str(ensure_embedded(say) / "model")))
    path = Path(os.path.expandvars(os.path.expanduser(name)))
    if is_checkpoint(name):
        return _find_checkpoint(name, path, model, say)
    refuse_run(path)
    return ModelSource(name, replace(model, path=local_or_hub(name)))


def _find_checkpoint(name: str, path: Path, model: ModelConfig, say: Any) -> ModelSource:
    problems = verify(path)
    if problems:
        raise CheckpointError(f"The checkpoint {path} is damaged and is not loaded: {problems[0]}.")
    files = read_manifest(path)["files"]
    if f"{HUGGINGFACE}/config.json" in files:  # adapters are folded in there, overrides are in its config
        whole = replace(model, path=str(path / HUGGINGFACE), tokenizer_path=None, lora_rank=0, override_config={})
        return ModelSource(name, whole)
    if find_run_of(path) is None or not any(file.startswith("actor/") for file in files):
        raise CheckpointError(
            f"The checkpoint {path} holds no Hugging Face model, and without its run's config.yaml (two folders above) "
            "and an actor's tensors it cannot be loaded. A run writes one with trainer.export_hf=last or all; "
            "`posttrain export` makes one of a supervised run's adapters."
        )
    base = model
    if model.path in (None, "embedded"):
        base = replace(model, path=str(ensure_embedded(say) / "model"))
    return ModelSource(name, base, checkpoint=path)


def load_tokenizer_of(source: ModelSource, *, raw: bool) -> Any:
    """The tokenizer; `raw` takes its chat template away, so that prompts are used as they are."""
    tokenizer = load_tokenizer(source.config)
    if raw:
        tokenizer.chat_template = None
    return tokenizer


def set_lengths(source: ModelSource, settings: Settings) -> None:
    """Fill in lengths that are not set: responses take at most half of the model's positions, prompts the rest."""
    data, given = settings.config.data, settings.given
    positions = read_positions(source) or 2**20
    if "data.max_response_length" not in given:
        data.max_response_length = min(MOST_TOKENS, positions // 2)
    if "data.max_prompt_length" not in given:
        data.max_prompt_length = positions - data.max_response_length
        if data.max_prompt_length < 1:
            raise ModelError(
                f"--max-tokens {data.max_response_length} leaves no room for a prompt: {source.name} has {positions} "
                "positions; lower it"
            )


def read_positions(source: ModelSource) -> int | None:
    """The most tokens of a sequence, by the model's config; None if it has no limit."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(str(source.config.path), trust_remote_code=source.config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source.name}: the model's config.json could not be read: {first_line(error)}") from error
    return getattr(found.get_text_config(), "max_position_embeddings", None)


def load_module(source: ModelSource, device: torch.device) -> torch.nn.Module:
    """The weights, on the device; a checkpoint's adapters are folded in (beside a base of 4 bits they stay apart)."""
    model = source.config
    place: dict[str, Any] = {"dtype": resolve_dtype(model.dtype, device), "device": device}
    if source.checkpoint is None:
        return load_causal_lm(model, **place)
    manager = CheckpointManager(source.checkpoint.parent)
    lora = stored_lora(manager, source.checkpoint)
    if lora is not None:
        advice = "Give the run's model back its folder, or export the checkpoint: posttrain export."
        adapted = adapted_model(manager, source.checkpoint, lora, model, **place, advice=advice)
        return adapted if lora["base"]["quantization"] else adapted.merge_and_unload()
    module = load_causal_lm(model, **place)
    _copy_checkpoint_weights(module, manager, source.checkpoint)
    return module


@torch.no_grad()
def _copy_checkpoint_weights(module: torch.nn.Module, manager: CheckpointManager, checkpoint: Path) -> None:
    stored = manager.describe(checkpoint, "actor")
    weights = {f"model.{name}": weight for name, weight in module.named_parameters()}
    missing = [name for name, weight in weights.items() if stored.get(name, (None,))[0] != weight.shape]
    if missing:
        raise CheckpointError(
            f"The checkpoint {checkpoint} does not fit the model of its run: {missing[0]} is missing or has another "
            "shape. Was the model's folder replaced since?"
        )
    into = {name: torch.empty(stored[name][0], dtype=stored[name][1]) for name in weights}
    manager.load_tensors(checkpoint, "actor", into, partial=True)
    for name, weight in weights.items():
        weight.copy_(into[name])
