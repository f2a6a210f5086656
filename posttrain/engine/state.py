"""Weights and optimizer state of one rank: what checkpoints hold, and where it all lies between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from posttrain.checkpoint.dcp import read_checked, write_tensors
from posttrain.engine.base import EngineSettings
from posttrain.engine.optim import Optimizer


class EngineState:
    """Saves, loads and offloads for an engine.

    `weights` gives the weights to save by their names in a checkpoint, `movable` is the module that is moved to host
    memory and back. With `parts` a checkpoint also holds weights of other ranks under names of their own.
    """

    def __init__(
        self,
        settings: EngineSettings,
        optimizer: Optimizer | None,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        movable: torch.nn.Module,
        *,
        together: bool,
        parts: bool = False,
    ) -> None:
        self.settings, self.optimizer, self.weights, self.movable = settings, optimizer, weights, movable
        self.together, self.parts = together, parts

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that an exact continuation needs: live tensors by flat names, the same for any number of ranks.

        Trained weights are there in the optimizer's precision.
        """
        # The optimizer's masters replace low-precision weights under the same names: they are what training goes on
        # from, and the weights are rounded from them.
        weights = {f"model.{name}": weight.detach() for name, weight in self.weights()}
        return {**weights, **(self.optimizer.state() if self.optimizer else {})}

    def save(self, folder: Path) -> None:
        write_tensors(folder, self.tensors(), together=self.together)

    def load(self, folder: Path) -> None:
        tensors = self.tensors()
        read_checked(folder, tensors, partial=self.parts)
        if self.optimizer:
            self.optimizer.loaded(tensors)

    def offload(self) -> None:
        if self.settings.param_offload:
            self.movable.to("cpu")
        if self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move("cpu")

    # Moments are only needed in the update, so that they come back by request: a pass without gradient has their room.
    def onload(self, *, optimizer: bool = False) -> None:
        if self.settings.param_offload:
            self.movable.to(self.settings.device)
        if optimizer and self.settings.optimizer_offload and self.optimizer:
            self.optimizer.move(self.settings.device)
