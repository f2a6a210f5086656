"""The contract of a train engine: what workers may ask of whatever holds the weights.

One engine may be spread over several ranks that hold one model together. Then all of them are called in the same
order, each with its own rows, and with equal numbers of passes.

While an engine computes it counts into `pulse.work("rows", ...)`: the rows of a pass when that pass is done.

Shapes: B rows, R response width (padded on the right).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.config.root import OptimConfig
from posttrain.engine.facts import EngineFacts
from posttrain.engine.micro_batches import Unit
from posttrain.engine.settings import RL, EngineKeys
from posttrain.errors import UserError
from posttrain.protocol import DataProto

if TYPE_CHECKING:
    from posttrain.engine.heads import Head
    from posttrain.engine.ranks import Ranks

# What the loss sees of one micro-batch: the rows, and the outputs of the model's head, each (rows, R).
# It returns its share of the mini-batch's loss; shares add up, so no split changes the gradient.
LossFn = Callable[[DataProto, dict[str, torch.Tensor]], torch.Tensor]

# The units of rows (counted within the batch) of each forward pass. A pass without units is computed over a token of
# its own and counts nothing: other ranks, which share the model with this one, have more rows.
Passes = list[list[Unit]]


@dataclass
class EngineSettings:
    """How an engine cuts its work and steps its optimizer; without `optim` the weights are frozen."""

    device: torch.device
    optim: OptimConfig | None = None
    total_steps: int = 1
    grad_clip: float = 1.0
    token_budget: int = 16384
    max_rows: int | None = None
    pack: bool = True
    share_prompts: bool = True
    exact: bool = False  # whether log-probs have the bits that the rollout gives them
    fp8: bool = False  # whether products with the frozen base beside adapters are those of fp8 copies
    # Of a mixture: whether its tokens take the experts that the batch holds (`ROUTES`), whether passes without gradient
    # record them, and whether the loss gets the values of the load-balance loss.
    replay_routes: bool = False
    record_routes: bool = False
    balance_load: bool = False
    gradient_checkpointing: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False
    ranks: Ranks | None = None  # the ranks that share the model by FSDP2; None for a process that holds it whole


@dataclass(frozen=True)
class EngineLayout:
    """Which engine holds a model, and how it cuts the model over ranks, as configured."""

    strategy: str = "fsdp2"
    keys: EngineKeys = RL  # where these settings are in the configuration, for error messages
    fsdp_size: int = -1
    sequence_size: int = 1
    # The settings that only this engine reads, such as `megatron_config`.
    own: Mapping[str, Any] = field(default_factory=dict)


class TrainEngine(ABC):
    """Weights that can be read, scored with and updated. Without `passes` an engine plans them itself."""

    @classmethod
    @abstractmethod
    def create(
        cls, module: torch.nn.Module, settings: EngineSettings, layout: EngineLayout, head: Head | None = None
    ) -> TrainEngine:
        """An engine over a loaded model. `head` is what is computed on top of its decoder; None is what the model
        itself has: a value head, or a language model's."""

    @classmethod
    @abstractmethod
    def check_model(cls, config: Any, layout: EngineLayout, *, ranks: int, packed: bool) -> None:
        """Raises if a model with this Hugging Face config cannot be held by so many ranks; no weights are loaded."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """Facts about the model, for processes that do not hold it."""

    @abstractmethod
    def compute(
        self, data: DataProto, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, torch.Tensor]:
        """The outputs of the head by name, without gradient; nothing on a rank without rows."""

    def log_probs(
        self, data: DataProto, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy`, each (B, R), of the responses; no gradient."""
        return self.compute(data, temperature=temperature, passes=passes)

    def take_routes(self) -> list[np.ndarray]:
        """The experts of each row's tokens in the last `log_probs`, where the engine records them."""
        raise UserError(f"The train engine {type(self).__name__} records no routes of experts")

    def values(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        """(B, R): the value of the state before each response token; no gradient."""
        found = self.compute(data, passes=passes)
        return found["values"] if found else torch.zeros(data.batch["responses"].shape)  # a rank without rows

    def scores(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        """(B,): a score at the end of each row; no gradient."""
        found = self.compute(data, passes=passes)
        return found["scores"][:, 0] if found else torch.zeros(0)  # a rank without rows

    @abstractmethod
    def update(
        self, data: DataProto, loss: LossFn, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch. Returns `grad_norm`, `lr`, `skipped` (1 if not finite), and metrics of
        the engine's own, the same on all ranks: they are logged as `actor/NAME`, `critic/NAME` or `train/NAME`. A name
        that a metric of posttrain has is rejected."""

    @abstractmethod
    def trial_pass(self, data: DataProto, loss: LossFn, *, passes: Passes | None = None) -> None:
        """All that `update` does before the step; nothing changes, but running out of memory shows."""

    @abstractmethod
    def base_only(self) -> AbstractContextManager[None]:
        """Inside, adapters are off: the model is its own reference."""

    @abstractmethod
    def live_model(self) -> torch.nn.Module | None:
        """The model itself, for a rollout that reads the trainer's own tensors; None where no process has it whole."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, adapters folded in."""

    def export_adapters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Adapters alone, under their names in an adapter file; for rollouts that hold the base."""
        raise UserError(
            f"The train engine {type(self).__name__} has no export_adapters(), so the rollout cannot hold adapters.\n"
            "  to do:  write it (contracts.md), or train all weights (model.lora_rank=0); where vLLM generates,\n"
            "          actor_rollout_ref.rollout.engine_kwargs.vllm.enable_lora=false folds them into the base"
        )

    @abstractmethod
    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        """A Hugging Face folder of the model. With adapters, whose settings are `adapter`: the merged model, or they
        alone."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write into the new folder `folder` everything that an exact continuation needs; each rank writes its part."""

    def begin_save(self, folder: Path) -> str | None:
        """Have a thread copy what `save` writes, and write the copy (`posttrain.checkpoint.parts`); what changes the
        state waits for the copy. An engine that does not, or cannot now, writes at once and returns the reason."""
        self.save(folder)
        return f"the train engine {type(self).__name__} has no begin_save()"

    def take_save_wait(self) -> float:
        """Seconds since the last call that the engine waited for the copy of `begin_save`."""
        return 0.0

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, on this or on another number of ranks."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights and optimizer state to host memory, as configured."""

    @abstractmethod
    def onload(self, *, optimizer: bool = False) -> None:
        """Bring back what `offload` moved."""

    @contextmanager
    def on_device(self, *, optimizer: bool = False) -> Iterator[None]:
        """Inside, the weights (and the optimizer state) are where they are computed with."""
        self.onload(optimizer=optimizer)
        try:
            yield
        finally:
            self.offload()
