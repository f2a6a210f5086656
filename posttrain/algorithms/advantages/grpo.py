"""GRPO: the advantage of a response is the distance of its reward from the mean reward of its group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)      r: rewards of the n responses to one prompt
                                                    std: sample deviation (n - 1), epsilon = 1e-6
    every token of response i that the policy wrote gets A_i; returns = advantages

The size of the distance counts, not the rank: rewards 1, 0.9, 0 do not give the same advantages as 1, 0.1, 0.
A group of equal rewards gives exactly 0 (nothing to learn); a group of one keeps its reward as advantage.

Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300.

When to use: tasks whose result a rule can check (mathematics, code, formats, games), because rewards of one prompt
are compared and no critic has to be trained, which saves a second model of about the policy's size. For rewards
that only a learned model can give, or that come at many points of a long dialogue, consider `ppo`.

Settings: algorithm.adv_estimator=grpo, actor_rollout_ref.rollout.n (5 to 8; see `rollout.n`),
algorithm.norm_adv_by_std_in_grpo, actor_rollout_ref.actor.use_kl_loss with kl_loss_coef and kl_loss_type,
actor_rollout_ref.actor.loss_agg_mode. `drgrpo` is this estimator with three settings changed.

Watch: reward_mean (rises), reward_std and groups/no_signal (is there anything to compare?), kl_loss,
response_length. policy_loss says little (see `policy_loss`).

Signs of failure: most groups without signal (all right: harder prompts; all wrong: easier prompts or a broken
reward); reward_mean falling while kl_loss grows (lower the learning rate); responses that grow longer while the
reward stays (see `drgrpo`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from posttrain.algorithms.common import AlgorithmError, keep_masked, setting
from posttrain.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GRPO, compares_group=True)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, advantages), each (rows, response length), 0 outside the mask.

    `index` names the group of each row (the `uid` array). `norm_adv_by_std_in_grpo` is off if the argument or
    `config` says so.
    """
    rewards_BT = token_level_rewards.detach()
    group_B = _groups(index, rows=rewards_BT.shape[0])
    normalise = norm_adv_by_std_in_grpo and setting(config, "norm_adv_by_std_in_grpo", True)
    scores_B = rewards_BT.sum(dim=-1).to("cpu", torch.float64).numpy()
    advantages_B = torch.from_numpy(_relative_to_group(scores_B, group_B, epsilon if normalise else None))

    dtype = rewards_BT.dtype if rewards_BT.is_floating_point() else torch.float32
    advantages_B1 = advantages_B.to(rewards_BT.device, dtype).unsqueeze(-1)
    advantages_BT = keep_masked(advantages_B1.expand(rewards_BT.shape), response_mask)
    return advantages_BT, advantages_BT


def _groups(index: Any, rows: int) -> np.ndarray:
    """The number of each row's group."""
    if index is None:
        raise AlgorithmError("`grpo` compares the responses of one prompt and needs `index`, the `uid` of each row.")
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    names_B = np.asarray(index)
    if names_B.shape != (rows,):
        raise AlgorithmError(
            f"`index` must name the group of each row: it has {names_B.size} entries (shape {names_B.shape}), "
            f"but `token_level_rewards` has {rows} rows."
        )
    return np.unique(names_B, return_inverse=True)[1]


def _relative_to_group(scores_B: np.ndarray, group_B: np.ndarray, epsilon: float | None) -> np.ndarray:
    """Distance of each score from its group's mean, over the group's deviation + epsilon if that is given.

    On the host, in float64 and in order of size, so that neither row order nor device changes a result. Scores are
    first taken relative to the group's lowest: the rounded mean of equal numbers can differ from them (three times
    0.1), and a division by their tiny deviation would turn that rounding into an advantage.
    """
    size_G = np.bincount(group_B)
    lowest_G = np.full(len(size_G), np.inf)
    np.minimum.at(lowest_G, group_B, scores_B)
    above_B = scores_B - lowest_G[group_B]
    order = np.lexsort((above_B, group_B))

    def group_sum(values_B: np.ndarray) -> np.ndarray:
        return np.bincount(group_B[order], weights=values_B[order], minlength=len(size_G))

    distance_B = above_B - (group_sum(above_B) / np.maximum(size_G, 1))[group_B]
    if epsilon is not None:
        deviation_G = np.sqrt(group_sum(distance_B**2) / np.maximum(size_G - 1, 1))
        distance_B = distance_B / (deviation_G + epsilon)[group_B]
    return np.where(size_G[group_B] == 1, scores_B, distance_B)
