"""CISPO: clips the importance ratio instead of the loss, so that every token keeps a gradient.

    loss = -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log_prob

PPO's clip drops tokens whose ratio left the range. These are often the rare ones at which reasoning turns ("However",
"Wait"), which are worth learning from. Here they keep their gradient, with a bounded weight.

Source: MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, arXiv 2506.13585.

When to use: long reasoning, several updates per batch, asynchronous runs.

Settings: algorithm=cispo sets actor_rollout_ref.actor.policy_loss.loss_mode=cispo, the estimator `grpo` and
actor_rollout_ref.actor.clip_ratio_low=1 (no lower bound, as in the paper) with
actor_rollout_ref.actor.clip_ratio_high, the bound that matters.

Watch: actor/pg_clipfrac (share of tokens with a bounded weight), actor/ppo_kl, actor/entropy.

Signs of failure: actor/ppo_kl grows from update to update: only the bound limits the policy; lower clip_ratio_high, the
learning rate or ppo_epochs.
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
    safe_log_ratio,
    weighted,
)
from posttrain.algorithms.registry import Preset, register_policy_loss
from posttrain.lazy import torch

CISPO = Preset(
    "CISPO (arXiv 2506.13585): GRPO with clipped importance weights.",
    {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo",
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.clip_ratio_low": 1.0,  # no lower bound
        "actor_rollout_ref.actor.clip_ratio_high": 0.2,
        "actor_rollout_ref.actor.use_kl_loss": False,
    },
)


@register_policy_loss("cispo", reads=CLIP, metrics=PPO_KL | CLIP_FRACTION, presets={"cispo": CISPO})
def compute_policy_loss_cispo(
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
    # The weight carries no gradient: the gradient is that of log_prob, as in REINFORCE.
    ratio = torch.exp(log_ratio).detach()
    # clip_ratio_low=1, as in the paper, means no lower bound.
    weight = ratio.clamp(max(0.0, 1 - low), 1 + high)
    losses = -weight * keep_masked(advantages, response_mask) * keep_masked(log_prob, response_mask)
    losses = weighted(losses, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": (weight != ratio).to(losses.dtype)})
