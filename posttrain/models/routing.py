"""Which experts the tokens of a pass are sent to: recorded in one pass, replayed in another (router replay).

A mixture's router scores all experts and chooses a few of them for each token. Rollout and trainer round differently,
so a token near the border between two experts may go to one in the rollout and to the other in the trainer: its
log-probs then differ by far more than rounding. Replay takes the choice from the recorded pass. The weights of the
chosen experts are computed anew from this pass's logits, so the router learns.

`watch_routers` makes the routers of a model consult the active `RoutePass`; without one they are transformers' own.

Shapes: T tokens of a pass, L layers with experts, X experts, K experts of a token, U positions that are read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from posttrain.errors import UserError
from posttrain.kernels.sequence_parallel import gathered, own_stretch, sequence_group


def _wide(logits_TX: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits_TX.dtype, torch.float32)


def _softmax(router: Any, logits_TX: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    weights_TK = logits_TX.softmax(-1, dtype=_wide(logits_TX)).gather(1, chosen_TK)
    # Mixtral always normalises, and does not round weights to the type of the model.
    if getattr(router, "norm_topk_prob", True):
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK.to(logits_TX.dtype) if hasattr(router, "norm_topk_prob") else weights_TK


def _scaled_softmax(router: Any, logits_TX: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    return logits_TX.softmax(-1, dtype=_wide(logits_TX)).gather(1, chosen_TK) * router.routed_scaling_factor


def _sigmoid(router: Any, logits_TX: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    weights_TK = logits_TX.sigmoid().gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * router.routed_scaling_factor


# How the routers of transformers weigh the experts that were chosen, by the name of their class.
_WEIGHTS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "MixtralTopKRouter": _softmax,
    "DeepseekV2TopkRouter": _scaled_softmax,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}
KNOWN = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a token are: `top_k` of so many `experts` in each of the `layers` that have them."""

    layers: int
    experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds the number of an expert."""
        return np.dtype(np.uint8 if self.experts <= 256 else np.int16)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.top_k * self.dtype.itemsize

    def empty(self) -> np.ndarray:
        """(0, L, K): the routes of no token."""
        return np.zeros((0, self.layers, self.top_k), self.dtype)


def routers_of(model: torch.nn.Module) -> list[Any]:
    """The routers of a model, in the order of its layers."""
    return [module for module in model.modules() if type(module).__name__ in _WEIGHTS]


def watch_routers(model: torch.nn.Module) -> None:
    """Let the routers of a model ask the active `RoutePass` which experts to take."""
    for number, router in enumerate(routers_of(model)):
        router.routed_layer = number
        router.forward = types.MethodType(_route, router)


def route_shape(model: torch.nn.Module) -> RouteShape | None:
    """The shape of a model's routes; None for a dense model, and for routers that cannot be replayed."""
    routers = routers_of(model)
    if not routers:
        return None
    return RouteShape(len(routers), routers[0].num_experts, routers[0].top_k)


def check_routes(model: Any, setting: str) -> RouteShape:
    """The shape of a model's routes; an error that names the setting which needs them where there are none."""
    shape = route_shape(model)
    if shape is None:
        raise UserError(
            f"{setting}: the model ({model.config.model_type}) has no routers that are known here; routes of experts "
            f"are recorded and replayed for {', '.join(KNOWN)}. Remove the setting"
        )
    if any(
        _WEIGHTS[type(router).__name__] is _scaled_softmax and outnumber_best_groups(router)
        for router in routers_of(model)
    ):
        raise UserError(
            f"{setting}: the model ({model.config.model_type}) sends a token to {shape.top_k} experts, and its best "
            "groups (topk_group) have fewer: the others get the weight 0, which a replay cannot reproduce. Remove the "
            "setting"
        )
    return shape


def outnumber_best_groups(router: Any) -> bool:
    """Whether a token gets more experts than there are in the groups that it is limited to."""
    # Of the rest transformers takes any: DeepSeek-V2 with the weight 0, DeepSeek-V3 and GLM-4-MoE with their own.
    if getattr(router, "num_group", None) is None or getattr(router, "topk_method", "") == "greedy":
        return False
    return router.top_k > router.topk_group * (router.num_experts // router.num_group)


@dataclass
class RoutePass:
    """The routes of one forward pass: what is given, and what the routers found.

    `given_TLK` are recorded routes, of the tokens in `known_T`; with `replays` these tokens take them, the others are
    routed as usual. `load_LX` is the share of all choices that each expert has, for the load-balance loss. `keeps`
    holds the choices after the pass. `weight_T` counts tokens, for the load of the experts in this pass.
    """

    given_TLK: torch.Tensor | None = None
    known_T: torch.Tensor | None = None
    replays: bool = False
    keeps: bool = False
    load_LX: torch.Tensor | None = None
    weight_T: torch.Tensor | None = None
    shape: RouteShape | None = None
    # By layer, so that a layer which is computed again in the backward pass counts once.
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    _values: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def route(self, router: Any, logits_TX: torch.Tensor, weights_TK: torch.Tensor, chosen_TK: torch.Tensor):
        """(logits, weights, experts) of a layer, as its router returns them."""
        layer = router.routed_layer
        given_TK = self._given(layer, len(logits_TX))
        if given_TK is not None:
            given_TK, known_T = given_TK
            differs_T = (given_TK.sort(-1).values != chosen_TK.sort(-1).values).any(-1) & known_T
            self._note("route_changes", layer, differs_T.float())
            if self.replays:
                chosen_TK = torch.where(known_T[:, None], given_TK, chosen_TK)
                weights_TK = _WEIGHTS[type(router).__name__](router, logits_TX, chosen_TK)
        with torch.no_grad():
            logp_TX = logits_TX.detach().log_softmax(-1, dtype=_wide(logits_TX))
            self._note("router_entropy", layer, -(logp_TX.exp() * logp_TX).sum(-1))
        if self.load_LX is not None:
            p_TX = logits_TX.softmax(-1, dtype=_wide(logits_TX))
            self._note("router_balance", layer, router.num_experts * (p_TX @ self.load_LX[layer].to(p_TX.dtype)))
        if self.keeps or self.weight_T is not None:
            self.chosen[layer] = chosen_TK.detach()
        return logits_TX, weights_TK, chosen_TK

    def _given(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.given_TLK is None:
            return None
        assert self.known_T is not None
        given_TK, known_T = _own(self.given_TLK[:, layer]), _own(self.known_T)
        assert len(known_T) == tokens, f"{len(known_T)} tokens have routes, and {tokens} are routed"
        return given_TK.long(), known_T

    def _note(self, name: str, layer: int, values_T: torch.Tensor) -> None:
        self._values.setdefault(name, {})[layer] = values_T

    def means_at(self, places_U: torch.Tensor) -> dict[str, torch.Tensor]:
        """What was measured of these tokens, as means over layers."""
        group, found = sequence_group(), {}
        for name, by_layer in self._values.items():
            values_T = torch.stack([by_layer[layer] for layer in sorted(by_layer)]).mean(0)
            found[name] = (values_T if group is None else gathered(values_T, group)).index_select(0, places_U)
        return found

    def chosen_TLK(self) -> torch.Tensor:
        """The experts that the tokens of the pass were sent to, on all ranks that share them."""
        chosen_TLK, group = torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1), sequence_group()
        return chosen_TLK if group is None else gathered(chosen_TLK, group)

    def counts_LX(self, experts: int) -> torch.Tensor:
        """How many tokens each expert got, counted by `weight_T`, on this rank."""
        assert self.weight_T is not None
        chosen_LTK = torch.stack([self.chosen[layer] for layer in sorted(self.chosen)])
        weight_T = _own(self.weight_T)
        counts_LX = weight_T.new_zeros(len(chosen_LTK), experts)
        return counts_LX.scatter_add_(1, chosen_LTK.flatten(1), _each(weight_T, chosen_LTK))


def _own(of_tokens: torch.Tensor) -> torch.Tensor:
    """This rank's part of values of all tokens, where ranks share them."""
    if (group := sequence_group()) is None:
        return of_tokens
    fill = -len(of_tokens) % group.size()
    return own_stretch(torch.cat([of_tokens, of_tokens.new_zeros(fill, *of_tokens.shape[1:])]), group)


def _each(weight_T: torch.Tensor, chosen_LTK: torch.Tensor) -> torch.Tensor:
    return weight_T[None, :, None].expand(chosen_LTK.shape).flatten(1)


_active: RoutePass | None = None


def active_routes() -> RoutePass | None:
    return _active


@contextmanager
def routed(routes: RoutePass | None) -> Iterator[None]:
    """While open, routers follow `routes`, and note what they chose there."""
    # A module variable, not a context variable: recomputation in the backward pass may run in autograd's own thread.
    global _active
    before, _active = _active, routes
    try:
        yield
    finally:
        _active = before


def _route(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    fused = vars(self).get("fused_choice")  # of paged steps (`experts.py`); None where it does not apply
    found = None if fused is None else fused(hidden_states)
    if found is None:
        found = type(self).forward(self, hidden_states, *args, **kwargs)
    return found if _active is None else _active.route(self, *found)
