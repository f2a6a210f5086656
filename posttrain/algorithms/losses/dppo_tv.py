"""DPPO with total variation: drops a token's gradient if its probability, rather than its ratio, has moved too far.

    p, q  = exp(log_prob), exp(old_log_prob)
    kept  : p - q <= high where A > 0;  p - q >= -low where A <= 0
    loss  = -A * stop_gradient(min(p / q, c)) * log_prob on kept tokens, 0 on the others

The distance |p - q| of the sampled token is a lower bound of the total variation between the two distributions. A ratio
measures something else: a rare token that goes from 0.001 to 0.002 has a ratio of 2 and hardly changes, while a
frequent one that goes from 0.99 to 0.6 has a ratio within most clip ranges and changes a lot.

Source: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879 (its binary form).

When to use: large vocabularies and off-policy runs, where PPO's clip affects rare tokens and lets frequent ones pass.
With actor_rollout_ref.actor.old_log_probs=rollout, the distance is measured from the policy that sampled, as in the
paper.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv; here actor_rollout_ref.actor.clip_ratio_low and
clip_ratio_high are differences of probabilities (0.1 to 0.2); actor_rollout_ref.actor.clip_ratio_c bounds the ratio
(the paper recommends a large one, such as 20).

Watch: actor/pg_clipfrac (share of dropped tokens), actor/ratio_bounded, actor/ppo_kl.

Signs of failure: nothing is ever dropped and actor/ppo_kl grows: use a smaller distance.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import CLIP, TRUSTED_METRICS, clip_sides, trusted_losses
from posttrain.algorithms.registry import register_policy_loss
from posttrain.lazy import torch


@register_policy_loss("dppo_tv", reads=(*CLIP, "clip_ratio_c"), metrics=TRUSTED_METRICS)
def compute_policy_loss_dppo_tv(
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
    # Only decides which tokens count, so it needs no gradient.
    moved = (torch.exp(log_prob) - torch.exp(old_log_prob)).detach()
    inside = torch.where(advantages > 0, moved <= high, moved >= -low)
    return trusted_losses(old_log_prob, log_prob, advantages, response_mask, inside, config, rollout_is_weights)
