"""REINFORCE++ with a baseline: subtracts the group's mean, and divides by the deviation of the whole batch.

    d_i = r_i - mean(r)                                   r: rewards of the n responses to one prompt
    A_i = (d_i - mean(d)) / sqrt(variance(d) + 1e-8)      over all tokens of the batch

There is one deviation for the whole batch instead of GRPO's one per group, so groups with nearly equal rewards are not
amplified. A group of one keeps its reward as d.

Source: REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization,
arXiv 2501.03262.

When to use: as `grpo`, if its division by each group's own deviation gives easy and hard prompts too much weight.

Settings: algorithm.adv_estimator=reinforce_plus_plus_baseline, actor_rollout_ref.rollout.n,
actor_rollout_ref.actor.use_kl_loss (the paper adds KL to the loss, estimated by `k2`).

Watch: reward_mean, reward_std, groups/no_signal, actor/grad_norm.

Signs of failure: as for `grpo`; with few prompts per batch the deviation itself is noisy (use a larger batch).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import (
    above_mean,
    group_of_rows,
    masked_whiten,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.registry import register_adv_est
from posttrain.lazy import torch


@register_adv_est("reinforce_plus_plus_baseline", reads=(), compares_group=True, several_rows="sample")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "reinforce_plus_plus_baseline")
    distance_B = above_mean(outcome_scores(token_level_rewards), group_B)
    distance_BT = on_every_token(distance_B, token_level_rewards.double(), response_mask)
    # Per token, so long responses count more in the mean and the deviation.
    advantages_BT = masked_whiten(distance_BT, response_mask).to(token_level_rewards.dtype)
    return advantages_BT, advantages_BT
