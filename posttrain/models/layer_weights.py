"""The weights of a decoder layer as the fused training pass takes them.

Shapes: T packed tokens, E width of the model, C columns of several products side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.kernels import train
from posttrain.kernels.gradient_sums import add_product
from posttrain.models.arena import end_to_end
from posttrain.models.fused_adapters import Beside, adapter_of, base_of, beside_products, can_fuse_adapter, flat

_LINEAR = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


class Joined:
    """Weights that the same input is multiplied with, their products side by side; one, where they lie end to end."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = (None,)) -> None:
        self.weights, self.rows = weights, [len(weight) for weight in weights]
        self.whole = end_to_end(weights)
        self.bias = None if biases[0] is None else _end_to_end(biases)  # pyright: ignore

    def product(self, x_TE: torch.Tensor, spare: int = 0) -> torch.Tensor:
        """With so many rows of zeros behind it."""
        if spare:
            y = x_TE.new_empty(len(x_TE) + spare, sum(self.rows))
            y[len(x_TE) :].zero_()
            return self._into(y, x_TE)
        if self.whole is None:
            y = torch.cat([x_TE @ weight.T for weight in self.weights], 1)
            return y if self.bias is None else y.add_(self.bias)
        return x_TE @ self.whole.T if self.bias is None else torch.addmm(self.bias, x_TE, self.whole.T)

    def _into(self, y: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        here = y[: len(x_TE)]
        if self.whole is None:
            here.copy_(self.product(x_TE))
        elif self.bias is None:
            torch.mm(x_TE, self.whole.T, out=here)
        else:
            torch.addmm(self.bias, x_TE, self.whole.T, out=here)
        return y

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor:
        """The gradient of the input."""
        return grad_TC @ (torch.cat(list(self.weights)) if self.whole is None else self.whole)

    def gradients(self, grad_TC: torch.Tensor, x_TE: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Of the weights; none, where sums take them."""
        if add_product(self.weights, grad_TC, x_TE):
            return (None,) * len(self.rows)
        return (grad_TC.T @ x_TE).split(self.rows)

    def bias_gradients(self, grad_TC: torch.Tensor) -> Sequence[torch.Tensor | None]:
        return (None,) * len(self.rows) if self.bias is None else train.column_sums(grad_TC).split(self.rows)


def _end_to_end(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = end_to_end(biases)
    return torch.cat([bias.detach() for bias in biases]) if whole is None else whole


@dataclass(frozen=True)
class LayerWeights:
    """What a layer multiplies with. `tensors` are all of them, those of adapters last."""

    before: torch.Tensor
    qkv: Joined
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    out: Joined
    between: torch.Tensor
    gate_up: Joined
    down: Joined
    beside: list[Beside]
    tensors: list[torch.Tensor | None]
    last: bool
    """Behind this layer there is no other."""

    OWN = 14  # of the tensors that are not adapters'

    @classmethod
    def of(cls, layer: Any) -> LayerWeights | None:
        """As they are now; None, unless all linear parts are plain or have plain adapters."""
        parts = [getattr(getattr(layer, home), name) for home, names in _LINEAR for name in names]
        if not all(map(can_fuse_adapter, parts)) or any(base_of(part).bias is not None for part in parts[3:]):
            return None
        adapters = tuple(map(adapter_of, parts))
        bases = list(map(base_of, parts))
        weights, biases = [base.weight for base in bases], [base.bias for base in bases[:3]]
        attention = layer.self_attn
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return cls(
            before,
            Joined(weights[:3], biases),
            norms,
            Joined(weights[3:4]),
            between,
            Joined(weights[4:6]),
            Joined(weights[6:]),
            beside_products(adapters, weights),
            [before, *weights[:3], *biases, *norms, weights[3], between, *weights[4:], *flat(adapters)],
            attention.layer_idx == attention.config.num_hidden_layers - 1,
        )
