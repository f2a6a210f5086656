"""OPO (on-policy optimal baseline): the baseline of a group is the mean of its rewards weighted by length.

    b   = sum(l_i * r_i) / sum(l_i)         l_i: tokens that the policy wrote in response i
    A_i = r_i - b

The baseline that makes the gradient least noisy weighs each reward by the squared size of its response's gradient;
that size grows about as the length does. A group of one keeps its reward.

Source: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

When to use: strictly on-policy runs (one update per batch) without KL and entropy terms, with responses of very
different lengths.

Settings: algorithm.adv_estimator=opo, actor_rollout_ref.rollout.n, actor_rollout_ref.actor.ppo_mini_batch_size equal
to data.train_batch_size.

Watch: actor/grad_norm (steadier than under `grpo`), reward_mean, actor/entropy, response_length.

Signs of failure: one very long response that sets the baseline of its group (a higher limit is filled by it): shape
long responses (see `overlong_buffer`).
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


@register_adv_est("opo", reads=(), compares_group=True)
def compute_opo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "opo")
    scores_B = outcome_scores(token_level_rewards)
    length_B = response_mask.bool().sum(dim=-1).to("cpu", torch.float64).numpy()
    above_B = above_lowest(scores_B, group_B)
    baseline_B = group_sum(length_B * above_B, group_B) / np.maximum(group_sum(length_B, group_B), 1.0)
    advantages_B = np.where(group_size(group_B) == 1, scores_B, above_B - baseline_B)
    advantages_BT = on_every_token(advantages_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
