"""The weights of a decoder layer for the fused training pass, with LoRA: y = x W' + s (x A') B', with W frozen.

peft's linear layers take five operations each; here an adapter is two small products, added to the large one in place,
and parts with the same input share the first of them. Adapters are float32. With a base in half precision they are
multiplied in its dtype; their gradients are float32, accumulated by the products if accumulators exist.

`Fp8Base` has a frozen base in fp8 beside them: the products of training passes read 8-bit copies of its weights.
Adapters, attention, norms, embedding and head compute as without it. It belongs to a train engine, and only passes of
that engine use it: the model itself, which is compared with transformers and exported, stays as it is.

Shapes: T packed tokens, E width of the model, C columns of several products side by side, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.kernels import cuda, train
from posttrain.kernels.fp8 import OLDEST, FrozenFp8Weight
from posttrain.kernels.gradient_sums import add_product
from posttrain.kernels.logprob_head import wide_product
from posttrain.kernels.ordered import is_for_cpu, ordered_product
from posttrain.kernels.train import can_attend, can_train
from posttrain.models.arena import as_one_tensor
from posttrain.models.forward import LAYERS, decoder_of, forward_mode_of
from posttrain.models.low_rank import Adapted, Adapter, LowRank, fill, merge

_LINEAR = (("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")), ("mlp", ("gate_proj", "up_proj", "down_proj")))


class Joined:
    """Weights that multiply the same input, with their products side by side; one product if they are consecutive.

    `ordered` are the same with adapters merged in: forward products are then those of `ordered_product`.
    With `fp8`, products and gradients of inputs are those of its rounded numbers."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (None,),
        ordered: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.weights, self.rows, self.ordered = weights, [len(weight) for weight in weights], ordered
        self.whole = as_one_tensor(weights)
        self.fp8: FrozenFp8Weight | None = None  # replaces the frozen weights in products, if requested
        self.bias = None if biases[0] is None else _end_to_end(biases)  # pyright: ignore

    def product(self, x_TE: torch.Tensor, spare: int = 0) -> torch.Tensor:
        """Return the product, followed by `spare` rows of zeros."""
        if self.ordered is not None:
            return self._ordered_product(x_TE, self.ordered)
        if spare:
            y = x_TE.new_empty(len(x_TE) + spare, sum(self.rows))
            y[len(x_TE) :].zero_()
            return self._into(y, x_TE)
        if self.fp8 is not None:
            return self.fp8.product(x_TE, self.bias)
        if x_TE.is_meta and is_for_cpu(x_TE):  # a memory plan: a real engine joins the weights
            return x_TE.new_empty(len(x_TE), sum(self.rows))
        if self.whole is None:
            y = torch.cat([x_TE @ weight.T for weight in self.weights], 1)
            return y if self.bias is None else y.add_(self.bias)
        return x_TE @ self.whole.T if self.bias is None else torch.addmm(self.bias, x_TE, self.whole.T)

    def _into(self, y: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor:
        here = y[: len(x_TE)]
        if self.fp8 is not None:
            self.fp8.product(x_TE, self.bias, here)
        elif self.whole is None:
            here.copy_(self.product(x_TE))
        elif self.bias is None:
            torch.mm(x_TE, self.whole.T, out=here)
        else:
            torch.addmm(self.bias, x_TE, self.whole.T, out=here)
        return y

    def _ordered_product(self, x_TE: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        whole, y = as_one_tensor(weights), x_TE.new_empty(len(x_TE), sum(self.rows))
        if whole is not None:
            return ordered_product(x_TE, whole, self.bias, into_TC=y)
        biases = (None,) * len(weights) if self.bias is None else self.bias.split(self.rows)
        for weight, bias, part in zip(weights, biases, y.split(self.rows, 1), strict=True):
            ordered_product(x_TE, weight, bias, into_TC=part)
        return y

    def add_product(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> None:
        """Add the product with the only weight to `y`."""
        if self.ordered is not None:
            ordered_product(x_TE, self.ordered[0], into_TC=y_TC, adds=True)
        elif self.fp8 is not None:
            y_TC.add_(self.fp8.product(x_TE, None))
        else:
            y_TC.addmm_(x_TE, self.weights[0].T)

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor:
        if self.fp8 is not None:
            return self.fp8.back(grad_TC)
        return grad_TC @ (torch.cat(list(self.weights)) if self.whole is None else self.whole)

    def gradients(self, grad_TC: torch.Tensor, x_TE: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the weights; None if accumulators took them."""
        if add_product(self.weights, grad_TC, x_TE):
            return (None,) * len(self.rows)
        return (grad_TC.T @ x_TE).split(self.rows)

    def bias_gradients(self, grad_TC: torch.Tensor) -> Sequence[torch.Tensor | None]:
        return (None,) * len(self.rows) if self.bias is None else train.column_sums(grad_TC).split(self.rows)


def _end_to_end(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = as_one_tensor(biases)
    return torch.cat([bias.detach() for bias in biases]) if whole is None else whole


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer. `tensors` holds all of them, those of adapters last."""

    before: torch.Tensor
    qkv: Joined
    head_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    out: Joined
    between: torch.Tensor
    gate_up: Joined
    down: Joined
    product_adapters: list[ProductAdapters]
    tensors: list[torch.Tensor | None]
    # Whether this is the last layer.
    last: bool

    OWN = 14  # how many tensors do not belong to adapters

    @classmethod
    def ordered(cls, layer: Any) -> LayerWeights | None:
        """Return the weights for products in the order of decoding, which merges adapters."""
        return cls.of(layer, exact=True)

    @classmethod
    def of(cls, layer: Any, *, exact: bool = False) -> LayerWeights | None:
        """Return the current weights; None unless all linear parts are plain or have plain adapters."""
        parts = [getattr(getattr(layer, home), name) for home, names in _LINEAR for name in names]
        if not all(map(can_fuse_adapter, parts)) or any(base_of(part).bias is not None for part in parts[3:]):
            return None
        adapters = tuple(map(adapter_of, parts))
        bases = list(map(base_of, parts))
        weights, biases = [base.weight for base in bases], [base.bias for base in bases[:3]]
        attention = layer.self_attn
        norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else (None, None)
        before, between = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        merged = [merge(*pair) for pair in zip(weights, adapters, strict=True)] if exact else None
        parts = (slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7))
        qkv, out, gate_up, down = (
            Joined(weights[part], biases if part.start == 0 else (None,), None if merged is None else merged[part])
            for part in parts
        )
        return cls(
            before,
            qkv,
            norms,
            out,
            between,
            gate_up,
            down,
            group_adapters(adapters, weights, merged=exact),
            [before, *weights[:3], *biases, *norms, weights[3], between, *weights[4:], *flat(adapters)],
            attention.layer_idx == attention.config.num_hidden_layers - 1,
        )


# Linear parts of a layer: q, k, v, o, gate, up, down.
PARTS = 7

# Parts with the same input.
PRODUCTS = ((0, 1, 2), (3,), (4, 5), (6,))

Adapters = tuple[Adapter | None, ...]
Grads = list[torch.Tensor | None]


class ProductAdapters:
    """The adapters of one product; possibly none. `merged`: the product has them already."""

    def __init__(
        self, parts: Sequence[int], adapters: Adapters, weights: Sequence[torch.Tensor], *, merged: bool = False
    ) -> None:
        self.merged, self.parts = merged, list[int]()
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
        # The only adapter covers all columns and ranks, so nothing needs slicing.
        self.alone = len(self.adapters) == len(parts) == 1

    @staticmethod
    def _rights(copies: LowRank) -> list[tuple[slice, torch.Tensor]]:
        # Ranks of each adapter, and its matrix from ranks to columns.
        return [(ranks, up.T) for up, (_, ranks) in zip(copies.ups, copies.places, strict=True)]

    def down(self, x_TE: torch.Tensor) -> torch.Tensor | None:
        return self.copies.down(x_TE) if self.copies else None

    def add(self, y_TC: torch.Tensor, x_TE: torch.Tensor) -> torch.Tensor | None:
        """Add to `y`; return x A', which the backward pass needs."""
        return self.copies.add(y_TC, x_TE) if self.copies and not self.merged else self.down(x_TE)

    def factors(self, part: int, low_TR: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what the adapter of a part adds to its columns, as two factors."""
        if low_TR is None or part not in self.rights or self.merged:
            return None
        ranks, up_RC = self.rights[part]
        return low_TR[:, ranks], up_RC

    def back(self, grad_TC: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of x A'."""
        return self.copies.back(grad_TC) if self.copies else None

    def into(self, grad_TR: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what is added to the input's gradient, as two factors."""
        return (grad_TR, self.copies.down_RE) if self.copies and grad_TR is not None else None

    def gradients(self, found: Grads, grad_TC: torch.Tensor, x_TE: torch.Tensor, low_TR, grad_TR) -> None:
        """Store the gradients of A and B of every part in `found`, unless accumulators take them."""
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
        """Compute these gradients, and add to the input's gradient."""
        if self.copies is not None:
            grad_TR = self.copies.back(grad_TC)
            grad_TE.addmm_(grad_TR, self.copies.down_RE)
            self.gradients(found, grad_TC, x_TE, low_TR, grad_TR)


def group_adapters(
    adapters: Adapters, weights: Sequence[torch.Tensor], *, merged: bool = False
) -> list[ProductAdapters]:
    """Collect the current adapters of each of `PRODUCTS`; `weights` are those of the seven parts."""
    found = [ProductAdapters(parts, adapters, weights, merged=merged) for parts in PRODUCTS]
    filled = [(one.copies, one.adapters) for one in found if one.copies is not None]
    if filled:
        fill(filled)
    return found


def base_of(part: Any) -> Any:
    return getattr(part, "base_layer", part)


def can_fuse_adapter(part: Any) -> bool:
    """Whether the part is a plain linear layer, or one with a plain peft adapter: no dropout, no variant of LoRA."""
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
    """Whether it is switched off, or already merged into the base."""
    return bool(part.disable_adapters or part.merged)


def adapter_of(part: Any) -> Adapter | None:
    return None if part is base_of(part) or is_off(part) else Adapter.of(part)


def flat(adapters: Adapters) -> list[torch.Tensor | None]:
    # A and B of every part, as a differentiable operation takes them.
    return [tensor for one in adapters for tensor in ((one.a, one.b) if one else (None, None))]


FP8_KEY = "actor_rollout_ref.actor.quantization=fp8"


class Fp8Base:
    """The fp8 copies of a model's layers, each made in the layer's first pass."""

    def __init__(self) -> None:
        self._copies: dict[torch.nn.Module, list[FrozenFp8Weight]] = {}

    def weights_of(self, layer: torch.nn.Module) -> LayerWeights | None:
        """Return the current weights of a layer, whose products with the base are those of the copies."""
        found = LayerWeights.of(layer)
        if found is None:
            return None
        products = (found.qkv, found.out, found.gate_up, found.down)
        if layer not in self._copies:
            # Once: the base is frozen. Scales follow from the weights alone, so a resumed run has the same copies.
            self._copies[layer] = [FrozenFp8Weight(_whole(joined)) for joined in products]
        for joined, copy in zip(products, self._copies[layer], strict=True):
            joined.fp8 = copy
        return found


def _whole(joined: Joined) -> torch.Tensor:
    return torch.cat([weight.detach() for weight in joined.weights]) if joined.whole is None else joined.whole


def check_fp8_base(module: Any, device: torch.device, *, sharded: bool = False) -> None:
    """Raise unless the training passes of this model, which is on the device, can read a base in fp8."""
    why = "the model is sharded over ranks, and copies are made of whole weights" if sharded else None
    if (why := why or why_no_fp8_base(module, device)) is not None:
        raise UserError(f"{FP8_KEY}: {why}. Remove the setting: products then have model.dtype")


def why_no_fp8_base(module: Any, device: torch.device) -> str | None:
    layers: Any = getattr(decoder_of(module), "layers", [None])
    weight, kind = next(module.parameters()), module.config.model_type
    if any(type(layer).__name__ not in LAYERS for layer in layers) or module.config.hidden_act != "silu":
        return f"models of the kind {kind} have no fused training pass, which computes these products"
    if not forward_mode_of(module).packed:
        return "the sequences of this model are not computed packed"
    if device.type == "cuda" and weight.dtype is not torch.bfloat16:
        return f"on CUDA these products have bfloat16 results, and this model is {weight.dtype}: set model.dtype"
    if device.type == "cuda" and cuda.runs_here(weight) and torch.cuda.get_device_capability(device) < OLDEST:
        least = ".".join(map(str, OLDEST))
        return f"matrix units multiply fp8 from compute capability {least} on, and {device} has less"
    if not can_train(weight):
        return f"{device} has no fused training pass for {weight.dtype} (a CPU needs float32 and a C++ compiler)"
    if not all(can_attend(layer.self_attn.head_dim, weight) for layer in layers):
        return "the size of its heads is not one of the fused training pass"
    if any(LayerWeights.of(layer) is None for layer in layers):
        return "its adapters are of another kind than plain LoRA"
    return None
