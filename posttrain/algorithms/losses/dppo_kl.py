"""DPPO with KL: drops a token's gradient if the KL divergence of "this token or another" has grown too large.

    p, q = exp(log_prob), exp(old_log_prob)
    KL   = q log(q / p) + (1 - q) log((1 - q) / (1 - p))
    kept : KL <= high, or p <= q, where A > 0;  KL <= low, or p >= q, where A <= 0
    loss = -A * stop_gradient(min(p / q, c)) * log_prob on kept tokens, 0 on the others

Like `dppo_tv`, with another distance: a token that moves back towards the old policy is always kept.

Source: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879 (its binary form).

When to use: as `dppo_tv`. KL also detects a frequent token that becomes impossible.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl; here actor_rollout_ref.actor.clip_ratio_low and
clip_ratio_high are KL divergences (about 0.05); actor_rollout_ref.actor.clip_ratio_c bounds the ratio (the paper
recommends a large one, such as 20).

Watch: actor/pg_clipfrac (share of dropped tokens), actor/ratio_bounded, actor/ppo_kl.

Signs of failure: nothing is ever dropped and actor/ppo_kl grows: use a smaller KL (0.2, the default of `vanilla`, is
large).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import CLIP, TRUSTED_METRICS, binary_kl, clip_sides, trusted_losses
from posttrain.algorithms.registry import register_policy_loss
from posttrain.lazy import torch


@register_policy_loss("dppo_kl", reads=(*CLIP, "clip_ratio_c"), metrics=TRUSTED_METRICS)
def compute_policy_loss_dppo_kl(
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
    log_prob, old_log_prob = keep_masked(log_prob, response_mask), keep_masked(old_log_prob, response_mask)
    kl, moved = binary_kl(old_log_prob, log_prob.detach()), (log_prob - old_log_prob).detach()
    # Tokens that move back towards the old policy are kept whatever their distance.
    inside = torch.where(advantages > 0, (kl <= high) | (moved <= 0), (kl <= low) | (moved >= 0))
    return trusted_losses(old_log_prob, log_prob, advantages, response_mask, inside, config, rollout_is_weights)
