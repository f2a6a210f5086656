"""OPO (on-policy optimal baseline): a group's baseline is the mean of its rewards, weighted by response length.

    b   = sum(l_i * r_i) / sum(l_i)         l_i: tokens that the policy wrote in response i
    A_i = r_i - b

The baseline with the least gradient noise weights each reward by the squared norm of its response's gradient, which
grows roughly with length. A group of one keeps its reward.

Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

When to use: strictly on-policy runs (one update per batch) without KL and entropy terms, with responses of very
different lengths.

Settings: algorithm.adv_estimator=opo, actor_rollout_ref.rollout.n, actor_rollout_ref.actor.ppo_mini_batch_size equal
to data.train_batch_size.

Watch: actor/grad_norm (steadier than with `grpo`), reward_mean, actor/entropy, response_length.

Signs of failure: one very long response determines the baseline of its group, often one that fills the length limit:
penalise long responses (see `overlong_buffer`).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import (
    above_lowest,
    group_of_rows,
    group_size,
    group_sum,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.registry import register_adv_est
from posttrain.lazy import numpy as np
from posttrain.lazy import torch


@register_adv_est("opo", reads=(), compares_group=True, several_rows="sample")
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "opo")
    scores_B = outcome_scores(token_level_rewards)
    length_B = response_mask.bool().sum(dim=-1).to("cpu", torch.float64).numpy()
    # Relative to the lowest, so that equal rewards give exactly 0 whatever the lengths.
    above_B = above_lowest(scores_B, group_B)
    baseline_B = group_sum(length_B * above_B, group_B) / np.maximum(group_sum(length_B, group_B), 1.0)
    advantages_B = np.where(group_size(group_B) == 1, scores_B, above_B - baseline_B)
    advantages_BT = on_every_token(advantages_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
