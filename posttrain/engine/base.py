"""The contract of a train engine: what the workers may ask of whatever holds the weights.

Shapes: B rows, R response width (padded on the right).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

from posttrain.protocol import DataProto

# What the loss sees of one micro-batch: the rows, and `log_probs` and `entropy` (or `values`), each (rows, R).
# It returns its share of the mini-batch's loss; shares add up, so no split changes the gradient.
LossFn = Callable[[DataProto, dict[str, torch.Tensor]], torch.Tensor]


class TrainEngine(ABC):
    """Weights that can be read, scored with and updated."""

    @abstractmethod
    def log_probs(self, data: DataProto, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """`log_probs` and `entropy`, each (B, R), of the responses; no gradient."""

    @abstractmethod
    def values(self, data: DataProto) -> torch.Tensor:
        """(B, R): the value of the state before each response token; no gradient."""

    @abstractmethod
    def update(self, data: DataProto, loss: LossFn, *, temperature: float = 1.0) -> dict[str, float]:
        """One optimizer step on one mini-batch. Metrics: `grad_norm`, `lr`, `skipped` (1 if not finite)."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights under their Hugging Face names, adapters folded in."""

    @abstractmethod
    def save(self) -> dict[str, torch.Tensor]:
        """Everything that an exact continuation needs, as flat names and tensors."""

    @abstractmethod
    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take back what `save` gave."""

    @abstractmethod
    def offload(self) -> None:
        """Move weights and optimizer state to host memory, as configured."""

    @abstractmethod
    def onload(self, *, optimizer: bool = False) -> None:
        """Bring back what `offload` moved."""
