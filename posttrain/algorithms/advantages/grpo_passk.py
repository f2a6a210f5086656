"""GRPO for pass@k: only the best response of a group gets an advantage, by how much it beats the second best.

    A_best = (r_best - r_second) / (std(r) + epsilon)       all others: 0
    without algorithm.norm_adv_by_std_in_grpo there is no division

The reward of a group is that of its best response, so a response earns only what the best would lose without it. If two
share first place, no response earns anything. A group of one keeps its reward.

Source: Optimizing Language Models for Inference Time Objectives using Reinforcement Learning, arXiv 2503.19595.

When to use: one success in k tries is enough (code with tests, search with a checker), and plain `grpo` makes the
responses too similar.

Settings: algorithm.adv_estimator=grpo_passk, actor_rollout_ref.rollout.n (the k), algorithm.norm_adv_by_std_in_grpo.

Watch: val/.../pass@k, groups/all_wrong, actor/entropy (should stay higher than with `grpo`).

Signs of failure: hardly any response has an advantage (prompts that are solved twice or never teach nothing): use
harder prompts, or a reward with more steps than right and wrong.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import (
    EPSILON,
    group_deviation,
    group_of_rows,
    group_size,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.common import read_setting
from posttrain.algorithms.registry import register_adv_est
from posttrain.lazy import numpy as np
from posttrain.lazy import torch


@register_adv_est(
    "grpo_passk",
    reads=("norm_adv_by_std_in_grpo",),
    compares_group=True,
    kl_belongs_in_loss=True,
    several_rows="sample",
    per_response=True,
)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, config: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "grpo_passk")
    scores_B = outcome_scores(token_level_rewards)
    # Sorted by group and then by score, so the best of a group is its last place.
    order = np.lexsort((scores_B, group_B))
    best_G = np.cumsum(np.bincount(group_B)) - 1  # the last place of each group in `order`
    # A tie for first place gives a lead of 0.
    lead_G = scores_B[order[best_G]] - scores_B[order[np.maximum(best_G - 1, 0)]]
    advantages_B = np.zeros_like(scores_B)
    advantages_B[order[best_G]] = lead_G
    if read_setting(config, "norm_adv_by_std_in_grpo", True):
        advantages_B /= group_deviation(scores_B, group_B) + EPSILON
    advantages_B = np.where(group_size(group_B) == 1, scores_B, advantages_B)
    advantages_BT = on_every_token(advantages_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
