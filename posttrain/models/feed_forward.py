"""The feed-forward part of a decoder layer for decoding: one gated product, or a mixture of experts.

Shapes: T tokens, E width of the model, X experts, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels.decode import chosen_experts, mixture, silu_mul
from posttrain.kernels.fp8 import Fp8Weight
from posttrain.kernels.quantized import Quantized
from posttrain.models.arena import Arena, Projection
from posttrain.models.expert_adapters import AdaptedExperts, is_wrapper, plain_experts, wrappers

MIXTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe")
_BLOCKS = ("Qwen3MoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "MixtralSparseMoeBlock", "OlmoeSparseMoeBlock")
_EXPERTS = ("Qwen3MoeExperts", "Qwen2MoeExperts", "MixtralExperts", "OlmoeExperts")


@dataclass
class Gated:
    """down(silu(gate) * up)."""

    gate_up: Projection
    down: Projection

    def __call__(self, x_TE: torch.Tensor | Quantized) -> torch.Tensor:
        both_T2I = self.gate_up(x_TE)
        if not self.down.takes_quantized:
            return self.down(silu_mul(both_T2I))
        from posttrain.kernels.cuda import fp8

        return self.down(fp8.silu_mul(both_T2I))

    @property
    def takes_quantized(self) -> bool:
        return self.gate_up.takes_quantized

    def captured(self, x_BE: torch.Tensor | Quantized) -> torch.Tensor:
        """The same in a captured decode step, where gate, up and gating may be one kernel."""
        from posttrain.kernels.cuda import fused_products

        weight = self.gate_up.bare
        if weight is not None and not isinstance(x_BE, Quantized) and fused_products.takes_gated(x_BE, weight):
            return self.down(fused_products.gated_product(x_BE, weight))
        return self(x_BE)

    @property
    def projections(self) -> Iterable[Projection]:
        return self.gate_up, self.down


@dataclass
class Mixture:
    """The experts that a router chooses for each token, weighted; some models add a shared expert for all tokens."""

    router_XE: torch.Tensor
    gate_up_X2IE: torch.Tensor
    down_XEI: torch.Tensor
    top_k: int
    normalised: bool
    share_dtype: torch.dtype
    shared: Gated | None = None
    shared_gate: torch.Tensor | None = None
    fp8: tuple[Fp8Weight, Fp8Weight] | None = None  # for gate and up, and for down; used in place of the weights
    adapted: AdaptedExperts | None = None  # the experts with their adapters, where they have any
    takes_quantized = False  # the router needs the unquantized input

    def hold_in_fp8(self) -> None:
        self.fp8 = Fp8Weight(self.gate_up_X2IE), Fp8Weight(self.down_XEI)

    def __call__(self, x_TE: torch.Tensor | Quantized, routes_TK: torch.Tensor | None = None) -> torch.Tensor:
        """The output of the chosen experts, which are written to `routes_TK`, where given."""
        assert isinstance(x_TE, torch.Tensor)
        return self._with_shared(x_TE, None if self.shared is None else self.shared(x_TE), routes_TK)

    def captured(self, x_BE: torch.Tensor | Quantized, routes_BK: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(x_BE, torch.Tensor)
        return self._with_shared(x_BE, None if self.shared is None else self.shared.captured(x_BE), routes_BK)

    def _with_shared(
        self, x_TE: torch.Tensor, shared_TE: torch.Tensor | None, routes_TK: torch.Tensor | None
    ) -> torch.Tensor:
        how = {"top_k": self.top_k, "normalised": self.normalised, "share_dtype": self.share_dtype}
        if self.adapted is not None:
            chosen_TK, share_TK = chosen_experts(x_TE, self.router_XE, **how)
            if routes_TK is not None:
                routes_TK.copy_(chosen_TK)
            return self._plus_shared(x_TE, self.adapted(x_TE, chosen_TK, share_TK), shared_TE)
        if self.fp8 is None:
            weights = self.gate_up_X2IE, self.down_XEI
        else:
            weights = self.fp8[0].rounded, self.fp8[1].rounded
        y_TE = mixture(x_TE, self.router_XE, *weights, fp8=self.fp8 is not None, routes_TJ=routes_TK, **how)
        return self._plus_shared(x_TE, y_TE, shared_TE)

    def _plus_shared(self, x_TE: torch.Tensor, y_TE: torch.Tensor, shared_TE: torch.Tensor | None) -> torch.Tensor:
        if shared_TE is None:
            return y_TE
        assert self.shared_gate is not None
        return y_TE + F.sigmoid(F.linear(x_TE, self.shared_gate)) * shared_TE

    @property
    def projections(self) -> Iterable[Projection]:
        return () if self.shared is None else self.shared.projections


def is_mixture(block: Any) -> bool:
    return hasattr(block, "experts")


def can_mix(block: Any) -> bool:
    """Whether it is a known kind with plain, stacked weights, with or without adapters."""
    experts = plain_experts(block.experts)
    if any(list(one.lora_A) != ["default"] or one.merged for one in wrappers(block.experts)):
        return False
    named = (type(module).__name__.removeprefix("FSDP") for module in (block, experts))
    if not all(name in known for name, known in zip(named, (_BLOCKS, _EXPERTS), strict=True)):
        return False
    gate = getattr(block, "shared_expert_gate", None)
    if gate is not None and (type(gate) is not torch.nn.Linear or gate.bias is not None):
        return False
    weights = (block.gate.weight, experts.gate_up_proj, experts.down_proj)
    return all(type(weight) is torch.nn.Parameter for weight in weights)


def feed_forward(arena: Arena, number: int, block: Any, name: str) -> Gated | Mixture:
    """Build the feed-forward part of a layer from the arena's weights; `name` is its module."""
    fused = arena.layers[number]
    gated = Gated(fused["gate_up"], fused["down"]) if "gate_up" in fused else None
    if not is_mixture(block):
        assert gated is not None
        return gated
    router = arena.named[f"{name}.gate.weight"]
    return Mixture(
        router,
        arena.named[f"{name}.experts.gate_up_proj"],
        arena.named[f"{name}.experts.down_proj"],
        top_k=block.gate.top_k,
        # Mixtral always does, and keeps weights in float32, so that they are not rounded before the product.
        normalised=getattr(block.gate, "norm_topk_prob", True),
        share_dtype=router.dtype if hasattr(block.gate, "norm_topk_prob") else torch.float32,
        shared=gated,
        shared_gate=arena.named.get(f"{name}.shared_expert_gate.weight"),
        # Weights of the arena's own have the adapters merged in already.
        adapted=AdaptedExperts(block.experts) if arena.share and is_wrapper(block.experts) else None,
    )
