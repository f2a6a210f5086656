"""The adapters of one matrix product, copied into its dtype: y = x W' + (x A') (s B)'.

The A of all adapters form one matrix, so that the input is read once; the copies of B include the scales. Rollout and
trainer multiply with the same values.

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
        return cls(part.lora_A["default"].weight, part.lora_B["default"].weight, float(part.scaling["default"]))


@torch.no_grad()
def merge(weight_CE: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """The weight with the adapter added: the weight itself without one, otherwise a copy."""
    return weight_CE if adapter is None else weight_CE + (adapter.b @ adapter.a).mul_(adapter.scale).to(weight_CE.dtype)


# Columns of the output, and the adapter that adds to them.
Adapted = Sequence[tuple[slice, Adapter]]


class LowRank:
    """The adapters of one product: one matrix to all ranks, and one from ranks to columns.

    The second has zeros where rank and column belong to different adapters. CUDA multiplies with it as it is, because
    few launches matter there more than few operations.
    """

    def __init__(self, down_RE: torch.Tensor, up_CR: torch.Tensor, places: list[tuple[slice, slice]]):
        self.down_RE, self.up_CR, self.places = down_RE, up_CR, places
        self.down_ER, self.up_RC = down_RE.T, up_CR.T
        self.downs = [down_RE[ranks] for _, ranks in places]
        self.ups = [up_CR[columns, ranks] for columns, ranks in places]
        self.whole = up_CR.is_cuda or self.ups[0].shape == up_CR.shape

    @classmethod
    def like(cls, adapters: Adapted, columns: int, weight: torch.Tensor) -> LowRank:
        """Allocate copies for a product with this many columns, in the weight's dtype and on its device."""
        places, start = [], 0
        for part, one in adapters:
            places.append((part, slice(start, start := start + len(one.a))))
        return cls(weight.new_empty(start, weight.shape[1]), weight.new_zeros(columns, start), places)

    def down(self, x_TE: torch.Tensor) -> torch.Tensor:
        return x_TE @ self.down_ER

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """Add to `y`; return x A', which the backward pass needs."""
        low_TR = self.down(x_TE)
        if self.whole:
            y_TC.addmm_(low_TR, self.up_RC)
            return low_TR
        for up, (columns, ranks) in zip(self.ups, self.places, strict=True):
            y_TC[:, columns].addmm_(low_TR[:, ranks], up.T)
        return low_TR

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x A'."""
        if self.whole:
            return grad_TC @ self.up_CR
        grad_TR = grad_TC.new_empty(len(grad_TC), len(self.down_RE))
        for up, (columns, ranks) in zip(self.ups, self.places, strict=True):
            torch.mm(grad_TC[:, columns], up, out=grad_TR[:, ranks])
        return grad_TR


@torch.no_grad()
def fill(products: Sequence[tuple[LowRank, Adapted]]) -> None:
    """Copy the current adapters of all these products at once."""
    ones = [one for _, adapters in products for _, one in adapters]
    highs = [one.b for one in ones]
    if any(one.scale != 1 for one in ones):
        highs = torch._foreach_mul(highs, [one.scale for one in ones])  # pyright: ignore
    rooms = [room for low, _ in products for room in low.downs], [room for low, _ in products for room in low.ups]
    torch._foreach_copy_(rooms[0] + rooms[1], [one.a for one in ones] + list(highs))  # pyright: ignore
