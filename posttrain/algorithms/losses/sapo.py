"""SAPO: a soft gate instead of a hard clip; the gradient fades as the ratio moves away from 1.

    gate(r) = 4 / tau * sigmoid(tau * (r - 1))       tau: tau_pos where A > 0, else tau_neg
    loss    = -A * gate(ratio)

At ratio 1 the gate's slope is 1, as without a gate. It falls smoothly on both sides instead of dropping to 0 at an
edge. A larger temperature fades faster. Negative advantages get the larger one, because their updates spread over all
other tokens.

Source: Soft Adaptive Policy Optimization, arXiv 2511.20347.

When to use: several updates per batch, if hard clipping discards too much (a high actor/pg_clipfrac) or whole responses
at once (`gspo`).

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=sapo, actor_rollout_ref.actor.policy_loss.tau_pos,
actor_rollout_ref.actor.policy_loss.tau_neg; unset, actor_rollout_ref.actor.loss_agg_mode is seq-mean-token-mean, as in
the paper. The clip settings have no effect.

Watch: actor/gate_slope (mean of the slope: 1 on-policy, lower the further the policy moved), actor/ppo_kl.

Signs of failure: the slope is near 0 (too many updates per batch, or too high a learning rate).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import PPO_KL, detached, safe_log_ratio, weighted
from posttrain.algorithms.registry import loss_settings, register_policy_loss
from posttrain.lazy import torch
from posttrain.settings import POSITIVE, setting


@dataclass
class SAPOSettings:
    """The settings of the loss `sapo`."""

    tau_pos: float = setting(1.0, range=POSITIVE)
    """Temperature of `sapo`'s gate where the advantage is positive; larger fades faster."""
    tau_neg: float = setting(1.05, range=POSITIVE)
    """Temperature of `sapo`'s gate where the advantage is zero or negative."""


METRICS = {
    **PPO_KL,
    "actor/gate_slope": "Under sapo: slope of the soft gate, 1 at a ratio of 1 and 0 where a token no longer counts.",
}


@register_policy_loss("sapo", settings=SAPOSettings, reads=(), metrics=METRICS, loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = torch.exp(log_ratio)
    advantages = keep_masked(advantages, response_mask)
    own = loss_settings(SAPOSettings, config)
    temperature = torch.full_like(ratio, own.tau_neg).masked_fill(advantages > 0, own.tau_pos)

    # The factor 4 / tau below makes the slope exactly 1 at ratio 1.
    share = torch.sigmoid(temperature * (ratio - 1))
    losses = weighted(-advantages * share * 4 / temperature, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/gate_slope": 4 * share * (1 - share)})
