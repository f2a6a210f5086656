"""What all workers with a train engine have in common: facts, checkpoints, exported folders, and notes on adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.config.model import ADAPTER_CONFIG, ModelConfig
from posttrain.controller.group import register, to_all, to_first
from posttrain.engine.base import TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.engine.ranks import this_rank
from posttrain.models.adapter_files import fingerprint
from posttrain.models.adapter_targets import stacked_note
from posttrain.rollout.engine_kwargs import OUTSIDE


class EngineWorker:
    """A role with a train engine; `adapters` is what a checkpoint says of LoRA adapters and their base."""

    config: Any
    engine: TrainEngine
    adapters: dict[str, Any] | None

    @register(to_first)
    def engine_facts(self) -> EngineFacts:
        """About the role's model."""
        return self.engine.facts()

    @register(to_first)
    def lora_state(self) -> dict[str, Any] | None:
        """The adapters' settings and the identity of their base, for the checkpoint; None where all is trained."""
        return self.adapters

    @register(to_all)
    def save(self, folder: Path) -> None:
        """Write this role's part of a checkpoint."""
        self.engine.save(folder)

    @register(to_all)
    def begin_save(self, folder: Path) -> str | None:
        """Copy this role's part of a checkpoint and write it in the background; or write it at once, and say why."""
        return self.engine.begin_save(folder)

    @register(to_all)
    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        self.engine.load(folder)


class ExportingWorker(EngineWorker):
    """One whose model is what the run is for."""

    tokenizer: Any

    @register(to_all)
    def export_hf(self, folder: Path) -> None:
        """A Hugging Face folder with tokenizer and chat template: the model, or under LoRA what `trainer.export_lora`
        says."""
        adapter = self.adapters["adapter"] if self.adapters else None
        self.engine.export_hf(folder, adapter, merged=self.config.trainer.export_lora == "merged")
        if this_rank() == 0:  # the engine gathers weights on all ranks; small files are written once
            self.tokenizer.save_pretrained(folder)


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
            # The path alone is not enough: a folder can be replaced, and adapters beside other weights give nonsense.
            "fingerprint": fingerprint(base),
            "dtype": dtype,
            "quantization": model.quantization,
            "override_config": model.override_config,
            "tokenizer_path": model.tokenizer_path,
        },
    }


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


def policy_notes(model: ModelConfig, engine: str, *, has_reference: bool) -> list[str]:
    """What the adapters of a policy mean for its reference and its rollout."""
    notes = []
    if model.lora_adapter_path is not None and has_reference:
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
