"""The adapters beside one matrix product, copied into the type that it is multiplied in: y = x W' + (x A') (s B)'.

A of all adapters of a product are one matrix, so that its input is read once; scales are in the copies of B. Rollout
and trainer multiply with the same copies' values.

Shapes: T tokens, E columns of the input, C of the output, R ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear part: A (R, E), B (C, R) and its scale."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @classmethod
    def of(cls, part: Any) -> Adapter:
        """Of a linear layer by peft."""
        return cls(part.lora_A["default"].weight, part.lora_B["default"].weight, float(part.scaling["default"]))


Adapted = Sequence[tuple[slice, Adapter]]
"""Columns of the output, and the adapter that adds to them."""


class LowRank:
    """The adapters of one product: one matrix down to all their ranks, and one up from them, with zeros where a rank
    and a column are of different adapters. A CUDA device multiplies by that as it is: few launches count there."""

    def __init__(self, down_RE: torch.Tensor, up_CR: torch.Tensor, places: list[tuple[slice, slice]]):
        self.down_RE, self.up_CR, self.places = down_RE, up_CR, places
        self.down_ER, self.up_RC = down_RE.T, up_CR.T
        self.downs = [down_RE[ranks] for _, ranks in places]
        self.ups = [up_CR[columns, ranks] for columns, ranks in places]
        self.whole = up_CR.is_cuda or self.ups[0].shape == up_CR.shape

    @classmethod
    def like(cls, adapters: Adapted, columns: int, weight: torch.Tensor) -> LowRank:
        """Room for them beside a product of so many columns, of the weight's type and device."""
        places, start = [], 0
        for part, one in adapters:
            places.append((part, slice(start, start := start + len(one.a))))
        return cls(weight.new_empty(start, weight.shape[1]), weight.new_zeros(columns, start), places)

    def down(self, x_TE: torch.Tensor) -> torch.Tensor:
        return x_TE @ self.down_ER

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """Adds to `y`; gives x A', which the way back needs."""
        low_TR = self.down(x_TE)
        if self.whole:
            y_TC.addmm_(low_TR, self.up_RC)
            return low_TR
        for up, (columns, ranks) in zip(self.ups, self.places, strict=True):
            y_TC[:, columns].addmm_(low_TR[:, ranks], up.T)
        return low_TR

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor:
        """The gradient of x A'."""
        if self.whole:
            return grad_TC @ self.up_CR
        grad_TR = grad_TC.new_empty(len(grad_TC), len(self.down_RE))
        for up, (columns, ranks) in zip(self.ups, self.places, strict=True):
            torch.mm(grad_TC[:, columns], up, out=grad_TR[:, ranks])
        return grad_TR


@torch.no_grad()
def fill(products: Sequence[tuple[LowRank, Adapted]]) -> None:
    """Take the adapters as they are now, those of all these products at once."""
    ones = [one for _, adapters in products for _, one in adapters]
    highs = [one.b for one in ones]
    if any(one.scale != 1 for one in ones):
        highs = torch._foreach_mul(highs, [one.scale for one in ones])  # pyright: ignore
    rooms = [room for low, _ in products for room in low.downs], [room for low, _ in products for room in low.ups]
    torch._foreach_copy_(rooms[0] + rooms[1], [one.a for one in ones] + list(highs))  # pyright: ignore
