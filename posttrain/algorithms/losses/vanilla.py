"""The clipped policy loss of PPO, also used by GRPO: per token, with separate lower and upper clips and a dual clip.

    ratio = exp(log_prob - old_log_prob)
    loss  = max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high))
    if A < 0, at most -A * c (dual clip), so that a token that became much likelier cannot dominate a step

Clipping removes the incentive to move a token's probability beyond the range in one batch. A clipped token has no
gradient. With one update per batch the ratio is 1 everywhere and nothing is clipped.

Source: Proximal Policy Optimization Algorithms, arXiv 1707.06347; dual clip: arXiv 1912.09729; a higher upper
clip: DAPO, arXiv 2503.14476.

When to use: the default for every estimator.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=vanilla, clip_ratio, clip_ratio_low, clip_ratio_high,
clip_ratio_c, and loss_agg_mode for how token losses become one number (all under actor_rollout_ref.actor).

Watch: actor/pg_clipfrac (share of clipped tokens, usually below 0.2), actor/pg_clipfrac_lower (dual clip, near 0),
actor/ppo_kl (how far the batch's updates moved the policy).

Signs of failure: the clip fraction keeps growing (lower the learning rate or ppo_epochs; a wider clip only loosens the
constraint); actor/ppo_kl is far from 0 at the first update (rollout and trainer disagree).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import AlgorithmError, keep_masked, read_setting
from posttrain.algorithms.losses.shared import (
    CLIP,
    CLIP_FRACTION,
    PPO_KL,
    detached,
    ratio_range,
    safe_log_ratio,
    weighted,
)
from posttrain.algorithms.registry import register_policy_loss
from posttrain.lazy import torch

METRICS = {
    **PPO_KL,
    **CLIP_FRACTION,
    "actor/pg_clipfrac_lower": """\
Share of tokens with negative advantage at which dual clip acts (ratio above clip_ratio_c). Near 0 in a healthy run.""",
}


@register_policy_loss("vanilla", reads=(*CLIP, "clip_ratio_c"), metrics=METRICS, clips_ratio=True)
def compute_policy_loss_vanilla(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask.

    `rollout_is_weights` multiply the losses (see `rollout_correction`).
    """
    low, high, dual = clip_range(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = torch.exp(log_ratio)
    advantages = keep_masked(advantages, response_mask)

    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    # The larger loss: clipping may only remove an incentive, never add one.
    pessimistic = torch.maximum(plain, clipped)
    # Without it, the loss of a token with A < 0 grows with its ratio without limit.
    bound = -advantages * dual
    negative = advantages < 0
    losses = weighted(
        torch.where(negative, torch.minimum(pessimistic, bound), pessimistic), rollout_is_weights, response_mask
    )

    metrics = {
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac": (clipped > plain).to(losses.dtype),
        "actor/pg_clipfrac_lower": (negative & (pessimistic > bound)).to(losses.dtype),
    }
    return losses, detached(metrics)


def clip_range(config: Any) -> tuple[float, float, float]:
    """Return (low, high, dual) from the actor's settings."""
    low, high = ratio_range(config)
    dual = read_setting(config, "clip_ratio_c", 3.0)
    if dual <= 1:
        raise AlgorithmError(f"actor_rollout_ref.actor.clip_ratio_c is {dual}; it must be above 1 (customary: 3).")
    return low, high, dual
