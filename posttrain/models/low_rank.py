"""Copies of the adapters beside one matrix product, in the type that it is multiplied in.

Shapes: T tokens, E columns of the input, C of the output, R ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Adapted = Sequence[tuple[slice, Any]]
"""Columns of the output, and the layer whose adapter adds to them."""


class LowRank:
    """The adapters of one product: what takes the input down to their ranks is one matrix for all of them."""

    def __init__(self, down_RE: torch.Tensor, ups: list[torch.Tensor], places: list[tuple[slice, slice, float]]):
        self.down_RE, self.ups, self.places = down_RE, ups, places

    @classmethod
    def like(cls, adapters: Adapted, weight: torch.Tensor) -> LowRank:
        """Room for them, of the weight's type and device."""
        ups, places, start = [], [], 0
        for columns, layer in adapters:
            rank = len(layer.lora_A["default"].weight)
            ups.append(weight.new_empty(columns.stop - columns.start, rank))
            places.append((columns, slice(start, start := start + rank), float(layer.scaling["default"])))
        return cls(weight.new_empty(start, weight.shape[1]), ups, places)

    def fill(self, adapters: Adapted) -> None:
        for (_, layer), up, (_, ranks, _) in zip(adapters, self.ups, self.places, strict=True):
            self.down_RE[ranks].copy_(layer.lora_A["default"].weight)
            up.copy_(layer.lora_B["default"].weight)

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> None:
        low_TR = x_TE @ self.down_RE.T
        for up, (columns, ranks, scale) in zip(self.ups, self.places, strict=True):
            y_TC[:, columns].addmm_(low_TR[:, ranks], up.T, alpha=scale)
