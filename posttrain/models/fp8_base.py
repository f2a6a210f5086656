"""A frozen base in fp8 beside trained adapters: the products of training passes read 8-bit copies of its weights.

Adapters, attention, norms, embedding and head compute as without it. `Fp8Base` belongs to a train engine, and only
passes of that engine use it: the model itself, which is compared with transformers and exported, stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.errors import UserError
from posttrain.kernels import cuda
from posttrain.kernels.fp8 import OLDEST, FrozenFp8Weight
from posttrain.kernels.train import can_attend, can_train
from posttrain.models.forward import LAYERS, decoder_of, forward_mode_of
from posttrain.models.layer_weights import Joined, LayerWeights

KEY = "actor_rollout_ref.actor.quantization=fp8"


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
        raise UserError(f"{KEY}: {why}. Remove the setting: products then have model.dtype")


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
