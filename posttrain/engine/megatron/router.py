"""Which experts a token is sent to, as each family of mixtures chooses them in transformers.

Megatron-Core's router cannot choose groups by their best expert (DeepSeek-V2), and rounds scores to float32.

Shapes: T packed tokens, X experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch

SIGMOID = ("deepseek_v3", "glm4_moe")
"""Families whose experts are scored one by one, with a correction that balances their load but is not trained."""
WIDE = (*SIGMOID, "deepseek_v2")
"""Families whose scores are computed in float32 at least."""


class ExpertRouter(torch.nn.Module):
    """Takes the place of `router` in a layer of Megatron-Core. `model` is the Hugging Face config."""

    def __init__(self, config: Any, *, model: Any, **_: Any) -> None:
        super().__init__()
        self.model, self.kind = model, model.model_type
        self.count = model.num_experts_per_tok
        self.weight = torch.nn.Parameter(
            torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype)
        )
        if self.kind in SIGMOID:
            self.correction: torch.Tensor
            self.register_buffer("correction", torch.zeros(config.num_moe_experts))
        # Mixtral's weights always add up to 1; DeepSeek-V2 has the setting and transformers does not follow it.
        self.normalized = self.kind == "mixtral" or (self.kind != "deepseek_v2" and bool(model.norm_topk_prob))
        in_groups = self.kind in SIGMOID or getattr(model, "topk_method", None) == "group_limited_greedy"
        self.groups = (getattr(model, "n_group", None) or 1) if in_groups else 1

    def set_layer_number(self, number: int) -> None:
        """Megatron-Core numbers its routers for its own metrics."""

    def forward(self, hidden: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (T, X), 0 of experts that were not chosen, and which were chosen (T, X)."""
        hidden = hidden.flatten(0, -2)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if self.kind in WIDE:
            logits_TX = torch.nn.functional.linear(hidden.to(wide), self.weight.to(wide))
        else:
            logits_TX = torch.nn.functional.linear(hidden, self.weight).to(wide)
        if self.kind in SIGMOID:
            scores_TX = logits_TX.sigmoid()
            ranked_TX = self._in_best_groups(scores_TX + self.correction)
        else:
            scores_TX = logits_TX.softmax(-1)
            ranked_TX = self._in_best_groups(scores_TX)
        chosen_TK = ranked_TX.topk(self.count, sorted=False).indices
        weights_TK = scores_TX.gather(1, chosen_TK)
        if self.normalized:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        weights_TK = weights_TK * getattr(self.model, "routed_scaling_factor", 1.0)
        if self.kind not in WIDE:
            weights_TK = weights_TK.to(hidden.dtype)
        weights_TX = torch.zeros_like(scores_TX, dtype=weights_TK.dtype).scatter(1, chosen_TK, weights_TK)
        return weights_TX, torch.zeros_like(scores_TX, dtype=torch.bool).scatter(1, chosen_TK, True)

    def _in_best_groups(self, ranked_TX: torch.Tensor) -> torch.Tensor:
        """Scores by which experts are chosen; those outside a token's best groups are ruled out."""
        if self.groups == 1:
            return ranked_TX
        grouped = ranked_TX.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2).values.sum(-1) if self.kind in SIGMOID else grouped.amax(-1)
        chosen = best.topk(self.model.topk_group, sorted=False).indices
        is_open = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
        return grouped.masked_fill(~is_open[..., None], float("-inf")).flatten(1)
