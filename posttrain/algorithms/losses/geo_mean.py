"""GMPO (geometric mean): clips the ratios of a response's tokens one by one, then averages them geometrically.

    d_t  = log_prob - old_log_prob, limited to -low ... high on the side towards which A pushes it
    loss = -A * exp(mean over the response's tokens of d_t)         A: the response's advantage

GRPO's mean of ratios follows outliers; the geometric mean hardly does, so a wider clip is safe. Every token carries the
loss of its whole response; the mean over tokens and responses is then the paper's mean over responses.

Importance weights (algorithm.rollout_correction) follow the same rule: a response has one ratio, so it has one weight,
the geometric mean of its tokens' weights. Without clipping, ratio times weight is then the geometric mean of the ratios
to the sampling policy. The mean of token weights would follow the outliers that the loss is designed to ignore. Tokens
of weight 0 (rejected or masked) are not part of any mean and carry no loss: one of them does not drop its response.

Source: Geometric-Mean Policy Optimization, arXiv 2507.20673.

When to use: several updates per batch with ratios that scatter (mixtures of experts, long responses).

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean, actor_rollout_ref.actor.clip_ratio_low and
actor_rollout_ref.actor.clip_ratio_high (in log-ratio; the paper takes 0.4 each); unset,
actor_rollout_ref.actor.loss_agg_mode is seq-mean-token-mean, as in the paper.

Watch: actor/pg_clipfrac, actor/ppo_kl, actor/entropy.

Signs of failure: advantages that differ within a response (`gae`, `remax` with KL in the reward) are averaged over it:
use a loss per token instead.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import (
    CLIP,
    CLIP_FRACTION,
    PPO_KL,
    clip_sides,
    detached,
    row_mean,
    safe_log_ratio,
)
from posttrain.algorithms.registry import register_policy_loss
from posttrain.lazy import torch


@register_policy_loss("geo_mean", reads=CLIP, metrics=PPO_KL | CLIP_FRACTION, loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_geo_mean(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    low, high = clip_sides(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    weight_B1, counted = _row_weights(rollout_is_weights, response_mask)
    # The paper has one advantage per response; estimators with one per token are averaged.
    advantage_B1 = row_mean(advantages, counted)
    clipped = log_ratio.clamp(-low, high)
    # Only the side is clipped towards which the advantage pushes, as in PPO.
    kept = torch.where(advantage_B1 > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    row_loss_B1 = -advantage_B1 * torch.exp(row_mean(kept, counted)) * weight_B1

    # On every token, so that the mean over tokens gives back the loss of the response.
    losses = keep_masked(row_loss_B1.expand_as(log_ratio), counted)
    bounded = keep_masked((kept != log_ratio).to(losses.dtype), response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": bounded})


def _row_weights(weights_BT: torch.Tensor | None, mask: torch.Tensor) -> tuple[torch.Tensor | float, torch.Tensor]:
    """((B, 1) each response's importance weight, without gradient; the tokens that are counted)."""
    if weights_BT is None:
        return 1.0, mask
    weights_BT = keep_masked(weights_BT.detach(), mask)
    # The logarithm of a rejected token's weight would be -inf, and take its whole response with it.
    counted = weights_BT > 0
    return torch.exp(row_mean(torch.where(counted, weights_BT, 1.0).log(), counted)), counted
