"""What all workers with a train engine have in common: facts, checkpoints, and an exported folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.controller.dispatch import register, to_all, to_first
from posttrain.engine.base import TrainEngine
from posttrain.engine.facts import EngineFacts
from posttrain.engine.ranks import this_rank


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
        if this_rank() == 0:
            self.tokenizer.save_pretrained(folder)
