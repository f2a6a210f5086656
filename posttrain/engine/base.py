"""The contract of a train engine: what the workers may ask of whatever holds the weights.

An engine may be one of several, a rank each, that hold one model together. Then all of them are called alike: with
their own rows, but with equal numbers of passes.

Shapes: B rows, R response width (padded on the right).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from posttrain.engine.facts import EngineFacts
from posttrain.engine.packing import Unit
from posttrain.protocol import DataProto

# What the loss sees of one micro-batch: the rows, and `log_probs` and `entropy` (or `values`), each (rows, R).
# It returns its share of the mini-batch's loss; shares add up, so no split changes the gradient.
LossFn = Callable[[DataProto, dict[str, torch.Tensor]], torch.Tensor]

# The units of rows (counted within the batch) of each forward pass. A pass without units is computed over a token of
# its own and counts nothing: others, with whom this rank shares the model, have more rows.
Passes = list[list[Unit]]


class TrainEngine(ABC):
    """Weights that can be read, scored with and updated. Without `passes` an engine plans them itself."""

    @abstractmethod
    def facts(self) -> EngineFacts:
        """About the model, for those who do not hold it."""

    @abstractmethod
    def log_probs(
        self, data: DataProto, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy`, each (B, R), of the responses; no gradient."""

    @abstractmethod
    def values(self, data: DataProto, *, passes: Passes | None = None) -> torch.Tensor:
        """(B, R): the value of the state before each response token; no gradient."""

    @abstractmethod
    def update(
        self, data: DataProto, loss: LossFn, *, temperature: float = 1.0, passes: Passes | None = None
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch. Metrics: `grad_norm`, `lr`, `skipped` (1 if not finite)."""

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

    @abstractmethod
    def export_hf(self, folder: Path, adapter: Mapping[str, Any] | None, *, merged: bool) -> None:
        """A Hugging Face folder of the model. With adapters, whose settings are `adapter`: the merged model, or they
        alone."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write into the new folder `folder` everything that an exact continuation needs; each rank writes its part."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, on this or on another number of ranks."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights and optimizer state to host memory, as configured."""

    @abstractmethod
    def onload(self, *, optimizer: bool = False) -> None:
        """Bring back what `offload` moved."""

    @abstractmethod
    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        """Inside, the weights (and the optimizer state) are where they are computed with."""
