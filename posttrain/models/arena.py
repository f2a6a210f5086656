"""The weights of a decoder as decoding needs them: fused, at fixed addresses, under their Hugging Face names.

Shared: the trainer's parameters become views into the fused tensors, so an optimizer step takes effect at once and
nothing is copied. Private (the trainer's weights move, or adapters are merged): `load` copies into them. Sharded: the
tensors are a rank's part of every weight (`shards.py`), and `load` copies that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels.compiled import kernel
from posttrain.kernels.fp8 import Fp8Weight
from posttrain.kernels.ordered import ordered_product
from posttrain.kernels.quantized import Quantized
from posttrain.models.expert_adapters import base_name
from posttrain.models.forward import without_adapters
from posttrain.models.low_rank import Adapter, LowRank, fill, merge
from posttrain.models.shards import WeightShards

FUSED = (("qkv", "self_attn", ("q_proj", "k_proj", "v_proj")), ("gate_up", "mlp", ("gate_proj", "up_proj")))
SINGLE = (("out", "self_attn", "o_proj"), ("down", "mlp", "down_proj"))
SHARED = "shared_expert"  # in a mixture of experts; the experts' own weights are already stacked and stay as they are


@cache
def _reorder() -> Callable[[torch.Tensor], torch.Tensor] | None:
    # oneDNN's own layout for bfloat16 weights; None if torch has no oneDNN, or the processor lacks the instructions.
    function = getattr(getattr(torch.ops, "mkldnn", None), "_reorder_linear_weight", None)
    if function is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        function(torch.zeros(32, 32, dtype=torch.bfloat16))
    except RuntimeError:
        return None
    return function


def can_repack_weights(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies faster with copies of weights in another layout."""
    allowed = kernel("can_multiply", torch.empty(0, dtype=dtype))
    whole = allowed is not None and bool(allowed())
    return whole or (dtype is torch.bfloat16 and _reorder() is not None)


class Projection:
    """One matrix product, with low-rank adapters if the model has them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: list[Any], *, adapters: bool) -> None:
        self.weight, self.bias, self.parts = weight, bias, parts
        self.packed: torch.Tensor | None = None
        self.fp8: Fp8Weight | None = None  # replaces the weight in products, if requested
        self.exact = False  # whether products have the order of summation of the training pass
        self.whole: torch.Tensor | None = None  # a copy with the adapters merged in, where `exact` multiplies with it
        self.low: LowRank | None = None  # copies of the adapters in the weight's dtype
        self.adapters: list[tuple[slice, Any]] = []
        start = 0
        for part in parts:
            end = start + base_layer(part).out_features
            if adapters and part is not base_layer(part):
                self.adapters.append((slice(start, end), part))
            start = end

    @torch.no_grad()
    def merged(self) -> torch.Tensor:
        """Return a copy of the weight with the adapters merged in."""
        # A copy: the live base is also the reference's, and must stay as it is.
        merged = self.weight.clone()
        for columns, layer in self.adapters:
            merged[columns] = merge(self.weight[columns], Adapter.of(layer))
        return merged

    def pack(self) -> None:
        """Copy the weight into oneDNN's layout, if that pays off: bfloat16 on a CPU."""
        if self.packed is None and self.weight.device.type == "cpu" and self.weight.dtype is torch.bfloat16:
            reorder = _reorder()
            self.packed = reorder(self.weight) if reorder else None

    @torch.no_grad()
    def copy_adapters(self) -> None:
        # In the weight's dtype, as the trainer multiplies them on CUDA; at fixed addresses, which captured graphs hold.
        if self.adapters and self.weight.is_cuda and self.weight.dtype in (torch.bfloat16, torch.float16):
            adapters = [(columns, Adapter.of(layer)) for columns, layer in self.adapters]
            self.low = self.low or LowRank.like(adapters, len(self.weight), self.weight)
            fill([(self.low, adapters)])
        if self.exact and self.adapters:
            self.whole = self.merged()

    @property
    def bare(self) -> torch.Tensor | None:
        """The weight, if this layer does nothing but multiply with it, and products may be fused with what follows."""
        return self.weight if self._plain and not self.exact else None

    @property
    def _plain(self) -> bool:
        return not self.adapters and self.bias is None and self.fp8 is None

    @property
    def takes_quantized(self) -> bool:
        """Whether its input may be fp8. Adapters multiply the unquantized input, so it would be needed too."""
        return self.fp8 is not None and self.fp8.multiplied and not self.adapters

    def wide(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Return the product in float32, as the device's matrix units accumulate it; used for logits."""
        narrow = x_TE.is_cuda and x_TE.dtype in (torch.bfloat16, torch.float16)
        if not narrow or not self._plain:
            return self(x_TE)
        return torch.mm(x_TE, self.weight.T, out_dtype=torch.float32)  # pyright: ignore

    def __call__(self, x_TE: torch.Tensor | Quantized) -> torch.Tensor:
        if self.exact and isinstance(x_TE, torch.Tensor):
            return ordered_product(x_TE, self.weight if self.whole is None else self.whole, self.bias)
        if self.fp8 is not None:
            y = self.fp8.product(x_TE, self.bias)
        elif self.packed is not None:
            y = torch.ops.mkldnn._linear_pointwise(x_TE, self.packed, self.bias, "none", [], "")
        else:
            y = F.linear(x_TE, self.weight, self.bias)  # pyright: ignore
        if isinstance(x_TE, Quantized):  # only layers without adapters get these
            return y
        if self.low is not None:
            self.low.add(y, x_TE)
            return y
        for columns, layer in self.adapters:
            down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            added = F.linear(F.linear(x_TE.to(down.dtype), down), up) * layer.scaling["default"]
            y[:, columns] += added.to(y.dtype)
        return y


def base_layer(module: Any) -> torch.nn.Linear:
    """Return the linear layer without its adapters."""
    return getattr(module, "base_layer", module)


class Arena:
    """Fused projections of every decoder layer, and all weights by name."""

    def __init__(
        self, module: Any, *, share: bool, shards: WeightShards | None = None, device: torch.device | None = None
    ) -> None:
        base = without_adapters(module)
        self.share, self.shards, self.device = share, shards, device
        # Its adapters are trained: the base then belongs to the trainer, and is its reference.
        self.is_trained = base is not module and any(weight.requires_grad for weight in module.parameters())
        self.layers: list[dict[str, Projection]] = []
        self.named: dict[str, torch.Tensor] = {}
        held: dict[int, torch.Tensor] = {}  # keyed by the parameter's identity, so that tied weights stay tied
        for name, weight in base.named_parameters(remove_duplicate=False):
            if ".lora_" not in name:
                # Shared: the decoder reads the trainer's own tensors, so that a weight sync copies nothing.
                held.setdefault(id(weight), weight.data if share else self._own(name, weight.data))
                self.named[base_name(name)] = held[id(weight)]
        for number, layer in enumerate(base.base_model.layers):
            self.layers.append(self._fused(layer, f"{base.base_model_prefix}.layers.{number}"))

    def _own(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if self.shards is None:
            return weight.clone()
        part = self.shards.part(name, weight)
        return torch.empty(part.shape, dtype=part.dtype, device=self.device).copy_(part)

    def _fused(self, layer: Any, prefix: str) -> dict[str, Projection]:
        found = {}
        homes = {"self_attn": ("self_attn", layer.self_attn), "mlp": ("mlp", layer.mlp)}
        if hasattr(layer.mlp, "experts"):
            homes["mlp"] = (f"mlp.{SHARED}", getattr(layer.mlp, SHARED, None))
        for key, home, names in FUSED:
            path, module = homes[home]
            if module is not None:
                parts = [getattr(module, name) for name in names]
                weight = self._fuse([f"{prefix}.{path}.{name}.weight" for name in names], parts, "weight")
                bias = self._fuse([f"{prefix}.{path}.{name}.bias" for name in names], parts, "bias")
                assert weight is not None
                found[key] = Projection(weight, bias, parts, adapters=self.share)
        for key, home, name in SINGLE:
            path, module = homes[home]
            if module is not None:
                found[key] = self.projection(f"{prefix}.{path}.{name}", [getattr(module, name)])
        return found

    def projection(self, name: str, parts: list[Any]) -> Projection:
        """Return a linear layer that is not fused with another."""
        return Projection(self.named[f"{name}.weight"], self.named.get(f"{name}.bias"), parts, adapters=self.share)

    def _fuse(self, names: list[str], parts: list[Any], kind: str) -> torch.Tensor | None:
        # If shared, each part's parameter becomes a view into the fused tensor.
        parameters = [getattr(base_layer(part), kind) for part in parts]
        if any(parameter is None for parameter in parameters):
            return None
        own = parameters if self.share else [self.named[name] for name in names]
        whole = make_one_tensor(parameters) if self.share else torch.cat(own)
        self.named |= zip(names, whole.split([len(part) for part in own]), strict=True)
        return whole

    def is_outdated(self) -> bool:
        """Whether shared parameters have moved (to host memory and back, for example) and must be fused again."""
        # One address tells: offloading moves all parameters together.
        part = self.layers[0]["qkv"].parts[0]
        return self.share and base_layer(part).weight.data_ptr() != self.layers[0]["qkv"].weight.data_ptr()

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights that are not already views into this arena."""
        for name, tensor in weights:
            own = self.named.get(name)
            # The same memory already holds the new values.
            if own is None or own.data_ptr() == tensor.data_ptr():
                continue
            if self.share and self.is_trained:
                raise RuntimeError("weights with adapters folded in must not be written over the live base weights")
            own.copy_(tensor if self.shards is None else self.shards.part(name, tensor))


def make_one_tensor(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Make these parameters views into one tensor, and return it."""
    whole = as_one_tensor(parameters)
    if whole is None:
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters]), strict=True):
            parameter.data = part
    return whole


def join_products(layer: Any) -> None:
    """Store weights that multiply the same tokens in one tensor: a decoder layer then computes one product."""
    for _, home, names in FUSED:
        parts = [base_layer(getattr(getattr(layer, home), name)) for name in names]
        for kind in ("weight", "bias"):
            parameters = [getattr(part, kind) for part in parts]
            if all(type(parameter) is torch.nn.Parameter and not parameter.is_meta for parameter in parameters):
                make_one_tensor(parameters)


def as_one_tensor(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the tensor in which these are already consecutive, or None."""
    first = parameters[0]
    rows, ends = sum(map(len, parameters)), first.data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != ends or not parameter.is_contiguous():
            return None
        # Neighbours in memory by chance are no single tensor: their storages may be freed apart.
        if parameter.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        ends += parameter.numel() * parameter.element_size()
    return first.data.as_strided((rows, *first.shape[1:]), first.stride())
