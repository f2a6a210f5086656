"""SAPO: instead of a hard clip a soft gate lets the gradient fade as the ratio leaves 1.

    gate(r) = 4 / tau * sigmoid(tau * (r - 1))       tau: tau_pos where A > 0, else tau_neg
    loss    = -A * gate(ratio)

At ratio 1 the gate's slope is 1, as without it; it falls smoothly on both sides instead of to 0 at an edge. A larger
temperature fades faster; negative advantages get the larger one, as their updates spread over all other tokens.

Source: Soft Adaptive Policy Optimization, arXiv 2511.20347.

When to use: hard clipping throws away too much (a high actor/pg_clipfrac) or whole responses at once (`gspo`), several
updates per batch.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=sapo, actor_rollout_ref.actor.policy_loss.tau_pos,
actor_rollout_ref.actor.policy_loss.tau_neg; unset, actor_rollout_ref.actor.loss_agg_mode is seq-mean-token-mean, as in
the paper. The clip settings have no effect.

Watch: actor/gate_slope (mean of the slope: 1 on-policy, lower the further the policy moved), actor/ppo_kl.

Signs of failure: a slope near 0 (too many updates per batch, or too high a learning rate).
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import detached, loss_setting, safe_log_ratio, weighted
from posttrain.algorithms.registry import register_policy_loss


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = torch.exp(log_ratio)
    advantages = keep_masked(advantages, response_mask)
    temperature = torch.full_like(ratio, loss_setting(config, "tau_neg", 1.05))
    temperature = temperature.masked_fill(advantages > 0, loss_setting(config, "tau_pos", 1.0))

    share = torch.sigmoid(temperature * (ratio - 1))
    losses = weighted(-advantages * share * 4 / temperature, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/gate_slope": 4 * share * (1 - share)})
