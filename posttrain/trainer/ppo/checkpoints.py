"""Checkpoints of a run of the PPO family: what a step leaves behind, and how a run continues from it, bit-for-bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain.planning.batch_sizes import Sizes
from posttrain.tracking.progress import say
from posttrain.trainer.ppo.recorder import Recorder
from posttrain.workers.groups import ActorRolloutGroup, CriticGroup


class Stateful(Protocol):
    """A part of the run with a small state, as plain JSON."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class HoldsBatch(Protocol):
    """A part of the run that may hold sampled responses for a later step, which are files of the checkpoint."""

    @property
    def is_empty(self) -> bool: ...
    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int
    bad_steps: int  # steps in a row whose updates were skipped


class Checkpoints:
    """Saves and restores a run: the roles' weights and optimizers, `parts` by their names in `state.json`, `batches`
    by the names of their flags there, and the global random numbers."""

    def __init__(
        self,
        recorder: Recorder,
        sizes: Sizes,
        *,
        actor: ActorRolloutGroup,
        critic: CriticGroup | None,
        parts: Mapping[str, Stateful],
        batches: Mapping[str, HoldsBatch],
    ) -> None:
        self.recorder, self.sizes = recorder, sizes
        self.actor, self.critic, self.parts, self.batches = actor, critic, parts, batches

    def save(self, progress: Progress) -> Path:
        """Write the checkpoint of this step, with a Hugging Face folder where one is due."""

        def extra(folder: Path) -> None:
            for held in self.batches.values():
                held.save(folder)
            if self.recorder.export_is_due(progress.step):
                self.actor.export_hf(folder / "huggingface")

        tensors: dict[str, Any] = {"actor": self.actor.save}
        if self.critic:
            tensors["critic"] = self.critic.save
        state = {
            "step": progress.step,
            "bad_steps": progress.bad_steps,
            **{name: part.state_dict() for name, part in self.parts.items()},
            **{name: not held.is_empty for name, held in self.batches.items()},
            "lora": self._adapters(),
        }
        return self.recorder.save(progress.step, tensors=tensors, state=state, export=extra)

    def restore(self) -> Progress | None:
        """Continue from `resume_from_path`, or from the newest good checkpoint of the run directory; None where there
        is nothing to continue from."""
        found, checkpoints = self.recorder.find_resume_point(self._adapters()), self.recorder.checkpoints
        if found is None:
            return None
        path, state = found
        self.actor.load(checkpoints.role_folder(path, "actor"))
        if self.critic:
            self.critic.load(checkpoints.role_folder(path, "critic"))
        progress = Progress(int(state["step"]), int(state["bad_steps"]))
        state.setdefault("prompts", progress.step * self.sizes.prompts)  # earlier versions did not count them
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        for name, held in self.batches.items():
            if state.get(name):
                held.load(path)
        self.recorder.continue_from(path, progress.step)
        self.actor.sync_weights(progress.step)
        say(f"Resumed from {path}: {progress.step} of {self.sizes.total_steps} steps are done.")
        return progress

    def _adapters(self) -> dict[str, Any]:
        """By role with adapters: what a checkpoint must say of them, as it does not hold their base."""
        found = {"actor": self.actor.lora_state()}
        if self.critic:
            found["critic"] = self.critic.lora_state()
        return {role: state for role, state in found.items() if state is not None}
