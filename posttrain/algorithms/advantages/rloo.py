"""RLOO (REINFORCE leave-one-out): each response is compared with the mean of the other responses to its prompt.

    A_i = r_i - mean(r_j for j != i) = n / (n - 1) * (r_i - mean(r))

A response is not part of its own baseline, which keeps the gradient unbiased. Nothing is divided by a deviation, so the
scale of the rewards matters. A group of one keeps its reward.

Source: Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback, arXiv 2402.14740.

When to use: instead of `grpo`, if prompts should not be weighted by difficulty, or if the rewards of a learned model
should keep their scale; as a simpler PPO without a critic.

Settings: algorithm=rloo sets algorithm.adv_estimator=rloo, actor_rollout_ref.rollout.n and KL in the reward
(algorithm.use_kl_in_reward, algorithm.kl_ctrl.kl_coef), as in the paper.

Watch: reward_mean (should rise), reward_std, actor/grad_norm, actor/reward_kl_penalty.

Signs of failure: the gradient norm follows the scale of the rewards (scale the reward, or use `grpo`); most groups have
no signal (see `groups/no_signal`).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import (
    above_mean,
    group_of_rows,
    group_size,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.kl_in_reward import KL_IN_REWARD
from posttrain.algorithms.registry import Preset, register_adv_est
from posttrain.lazy import numpy as np
from posttrain.lazy import torch

RLOO = Preset(
    "RLOO (arXiv 2402.14740): each response against the others, KL in the reward.",
    {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 5, **KL_IN_REWARD},
)


@register_adv_est(
    "rloo", reads=(), presets={"rloo": RLOO}, compares_group=True, several_rows="sample", per_response=True
)
def compute_rloo_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "rloo")
    size_B = group_size(group_B)
    # n / (n - 1) times the distance from the mean of all equals the distance from the mean of the others.
    factor_B = np.where(size_B == 1, 1.0, size_B / np.maximum(size_B - 1, 1))
    advantages_B = factor_B * above_mean(outcome_scores(token_level_rewards), group_B)
    advantages_BT = on_every_token(advantages_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
