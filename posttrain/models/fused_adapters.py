"""LoRA inside the fused layer: y = x W' + s (x A') B', with the base frozen.

What peft's linear layers do in five operations each is two small products here, added to the large one in place; parts
that read the same input go down to their ranks together. Adapters are float32; beside a base in half precision they are
multiplied in its type, and their gradients are float32, added up by the products where sums wait for them.

Shapes: T tokens, E columns of the input, C of the output, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from posttrain.kernels.gradient_sums import add_product
from posttrain.kernels.logprob_head import wide_product
from posttrain.models.low_rank import Adapted, Adapter, LowRank, fill

PARTS = 7
"""Linear parts of a layer: q, k, v, o, gate, up, down."""

PRODUCTS = ((0, 1, 2), (3,), (4, 5), (6,))
"""The parts that read the same input."""

Adapters = tuple[Adapter | None, ...]
Grads = list[torch.Tensor | None]


class Beside:
    """The adapters beside one product; there may be none, and then nothing is done."""

    def __init__(self, parts: Sequence[int], adapters: Adapters, weights: Sequence[torch.Tensor]) -> None:
        self.parts: list[int] = []
        self.adapters: Adapted = []
        start = 0
        for part in parts:
            columns = slice(start, start := start + len(weights[part]))
            if (one := adapters[part]) is not None:
                self.parts.append(part)
                self.adapters.append((columns, one))
        self.copies = LowRank.like(self.adapters, start, weights[parts[0]]) if self.adapters else None
        self.lows = [one.a for _, one in self.adapters]
        self.rights = {} if self.copies is None else dict(zip(self.parts, self._rights(self.copies), strict=True))
        self.alone = len(self.adapters) == len(parts) == 1  # columns and ranks of the adapter are all there are

    @staticmethod
    def _rights(copies: LowRank) -> list[tuple[slice, torch.Tensor]]:
        """Ranks of each adapter, and the matrix up from them."""
        return [(ranks, up.T) for up, (_, ranks) in zip(copies.ups, copies.places, strict=True)]

    def down(self, x_TE: torch.Tensor) -> torch.Tensor | None:
        """x A' of all."""
        return self.copies.down(x_TE) if self.copies else None

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor | None:
        """Adds to `y`; gives x A', which the way back needs."""
        return self.copies.add(y_TC, x_TE) if self.copies else None

    def factors(self, part: int, low_TR: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the adapter of a part adds to its columns, as the two matrices whose product it is."""
        if low_TR is None or part not in self.rights:
            return None
        ranks, up_RC = self.rights[part]
        return low_TR[:, ranks], up_RC

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor | None:
        """The gradient of x A'."""
        return self.copies.back(grad_TC) if self.copies else None

    def into(self, grad_TR: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What is added to the gradient of the input, as the two matrices whose product it is."""
        return (grad_TR, self.copies.down_RE) if self.copies and grad_TR is not None else None

    def gradients(self, found: Grads, grad_TC: torch.Tensor, x_TE: torch.Tensor, low_TR, grad_TR) -> None:
        """Put the gradients of A and B of every part into `found`, unless sums take them."""
        if self.copies is None:
            return
        if not add_product(self.lows, grad_TR, x_TE):
            stacked_RE = wide_product(grad_TR.T, x_TE)
            for part, low, (_, ranks) in zip(self.parts, self.lows, self.copies.places, strict=True):
                found[2 * part] = stacked_RE[ranks].to(low.dtype)
        for part, (columns, one), (_, ranks) in zip(self.parts, self.adapters, self.copies.places, strict=True):
            grad, low = (grad_TC, low_TR) if self.alone else (grad_TC[:, columns], low_TR[:, ranks])
            if not add_product((one.b,), grad, low, one.scale):
                found[2 * part + 1] = wide_product(grad.T, low).mul_(one.scale).to(one.b.dtype)

    def both(self, found: Grads, grad_TC: torch.Tensor, x_TE: torch.Tensor, low_TR, grad_TE: torch.Tensor) -> None:
        """The same, and what they add to the gradient of the input."""
        if self.copies is not None:
            grad_TR = self.copies.back(grad_TC)
            grad_TE.addmm_(grad_TR, self.copies.down_RE)
            self.gradients(found, grad_TC, x_TE, low_TR, grad_TR)


def beside_products(adapters: Adapters, weights: Sequence[torch.Tensor]) -> list[Beside]:
    """The adapters beside each of `PRODUCTS`, as they are now; `weights` are the seven parts'."""
    found = [Beside(parts, adapters, weights) for parts in PRODUCTS]
    filled = [(one.copies, one.adapters) for one in found if one.copies is not None]
    if filled:
        fill(filled)
    return found


def base_of(part: Any) -> Any:
    """The linear layer itself, of one that may have an adapter."""
    return getattr(part, "base_layer", part)


def can_fuse_adapter(part: Any) -> bool:
    """Whether the part is a plain linear layer, or one with a plain adapter by peft: no dropout, no variant of LoRA."""
    if type(base_of(part)) is not torch.nn.Linear or type(base_of(part).weight) is not torch.nn.Parameter:
        return False
    if part is base_of(part) or is_off(part):
        return True
    if list(part.active_adapters) != ["default"] or "default" not in part.lora_A:
        return False
    if getattr(part, "fan_in_fan_out", False) or getattr(part, "lora_variant", None):
        return False
    dropout = part.lora_dropout["default"]
    random = dropout.training and getattr(dropout, "p", 0.0) > 0
    low, high = part.lora_A["default"], part.lora_B["default"]
    plain = all(type(x) is torch.nn.Linear and x.bias is None for x in (low, high))
    return plain and not random and all(type(x.weight) is torch.nn.Parameter for x in (low, high))


def is_off(part: Any) -> bool:
    """Switched off, or already in the base's own weight."""
    return bool(part.disable_adapters or part.merged)


def adapter_of(part: Any) -> Adapter | None:
    return None if part is base_of(part) or is_off(part) else Adapter.of(part)


def flat(adapters: Adapters) -> list[torch.Tensor | None]:
    """A and B of every part, as a differentiable operation takes them."""
    return [tensor for one in adapters for tensor in ((one.a, one.b) if one else (None, None))]
