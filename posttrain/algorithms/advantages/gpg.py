"""GPG (group policy gradient): the distance from the group's mean, scaled up to make up for groups without signal.

    A_i = alpha * (r_i - mean(r))        alpha = responses of the batch / responses in groups that have a signal

Groups with equal rewards give no gradient but count in the batch's mean. alpha compensates for them, so that the
gradient does not shrink as more prompts are solved. A group of one keeps its reward.

Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546.

When to use: with the loss of the same name (plain policy gradient without ratio and clip, see `gpg_loss`), one update
per batch.

Settings: algorithm.adv_estimator=gpg, actor_rollout_ref.actor.policy_loss.loss_mode=gpg, actor_rollout_ref.rollout.n.

Watch: groups/no_signal (alpha is 1 / (1 - it)), actor/grad_norm, reward_mean.

Signs of failure: the gradient norm grows while few groups have a signal, because alpha rests on too few responses; use
more prompts per batch, or refill them (see `dapo`).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import above_mean, group_of_rows, group_sum, on_every_token, outcome_scores
from posttrain.algorithms.registry import register_adv_est
from posttrain.lazy import numpy as np
from posttrain.lazy import torch


@register_adv_est("gpg", reads=(), compares_group=True, several_rows="sample", per_response=True)
def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    group_B = group_of_rows(index, len(token_level_rewards), "gpg")
    distance_B = above_mean(outcome_scores(token_level_rewards), group_B)
    has_signal_B = group_sum(np.abs(distance_B), group_B) > 0
    # At least 1 in the denominator: without any signal all distances are 0 anyway.
    alpha = len(distance_B) / max(int(has_signal_B.sum()), 1)
    advantages_BT = on_every_token(alpha * distance_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
