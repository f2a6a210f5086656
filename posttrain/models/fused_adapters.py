"""LoRA inside the fused layer: y = x W' + s (x A') B', with the base frozen.

What peft's linear layers do in five operations each is two small products here, added to the large one in place.
Adapters are float32; beside a base in half precision they are multiplied in its type, and their gradients are float32.

Shapes: T tokens, E columns of the input, C of the output, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from posttrain.kernels.logprob_head import wide_product

PARTS = 7
"""Linear parts of a layer: q, k, v, o, gate, up, down."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear part: A (R, E), B (C, R) and its scale."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        """Add s (x A') B' to `y`; gives x A', which the way back needs."""
        low_TR = x_TE @ self.a.to(x_TE.dtype).T
        y_TC.addmm_(low_TR, self.b.to(x_TE.dtype).T, alpha=self.scale)
        return low_TR

    def back(
        self, grad_TC: torch.Tensor, x_TE: torch.Tensor, low_TR: torch.Tensor, grad_TE: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of A and B; that of x is added to `grad_TE`, where one is wanted."""
        grad_TR = grad_TC @ self.b.to(grad_TC.dtype)
        if grad_TE is not None:
            grad_TE.addmm_(grad_TR, self.a.to(grad_TC.dtype), alpha=self.scale)
        grad_a, grad_b = wide_product(grad_TR.T, x_TE), wide_product(grad_TC.T, low_TR)
        return grad_a.mul_(self.scale).to(self.a.dtype), grad_b.mul_(self.scale).to(self.b.dtype)


Adapters = tuple[Adapter | None, ...]
NONE: Adapters = (None,) * PARTS


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
    if part is base_of(part) or is_off(part):
        return None
    return Adapter(part.lora_A["default"].weight, part.lora_B["default"].weight, float(part.scaling["default"]))


def flat(adapters: Adapters) -> list[torch.Tensor | None]:
    """A and B of every part, as a differentiable operation takes them."""
    return [tensor for one in adapters for tensor in ((one.a, one.b) if one else (None, None))]
