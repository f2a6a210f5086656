"""GRPO: the advantage of a response is the distance of its reward from the mean reward of its group.

    A_i = (r_i - mean(r)) / (std(r) + epsilon)      r: rewards of the n responses to one prompt
                                                    std: sample deviation (n - 1), epsilon = 1e-6
    every token of response i that the policy wrote gets A_i; returns = advantages

The distance counts, not the rank: rewards 1, 0.9, 0 do not give the same advantages as 1, 0.1, 0. A group of equal
rewards gives exactly 0 (nothing to learn); a group of one keeps its reward as its advantage.

Source: DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300.

When to use: tasks whose result a rule can check (mathematics, code, formats, games). The responses to one prompt are
compared with each other, so no critic is needed, which saves a second model of about the policy's size. For rewards
that only a learned model can give, or that come at many points of a long dialogue, consider `ppo`.

Settings: algorithm.adv_estimator=grpo, actor_rollout_ref.rollout.n (5 to 8; see `rollout.n`),
algorithm.norm_adv_by_std_in_grpo, actor_rollout_ref.actor.use_kl_loss with kl_loss_coef and kl_loss_type,
actor_rollout_ref.actor.loss_agg_mode. `drgrpo` is this estimator with three other settings.

Watch: reward_mean (should rise), reward_std and groups/no_signal (do rewards differ within groups?), kl_loss,
response_length. policy_loss says little (see `policy_loss`).

Signs of failure: most groups have no signal (all right: use harder prompts; all wrong: use easier prompts, or fix the
reward); reward_mean falls while kl_loss grows (lower the learning rate); responses grow longer while the reward does
not (see `drgrpo`).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import (
    EPSILON,
    above_mean,
    group_of_rows,
    normalised,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.common import read_setting
from posttrain.algorithms.registry import Preset, register_adv_est
from posttrain.lazy import torch

GRPO = Preset(
    "GRPO (arXiv 2402.03300): groups of 5, KL to the reference in the loss.",
    {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 5,  # the paper samples 64 per question
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",  # k3, the paper's estimator
    },
)
DRGRPO = Preset(
    "DrGRPO (arXiv 2503.20783): no division by deviation or length, no KL.",
    {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,  # removes the bias by difficulty
        "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",  # removes the bias by length
        "actor_rollout_ref.actor.use_kl_loss": False,
    },
)
DAPO = Preset(
    "DAPO (arXiv 2503.14476): groups of 16, higher upper clip, dynamic sampling, overlong shaping, no KL.",
    {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,  # dynamic sampling: only groups with signal
        "algorithm.filter_groups.metric": "acc",
        "algorithm.filter_groups.max_num_gen_batches": 10,  # groups without signal then fill the batch
        "actor_rollout_ref.rollout.n": 16,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,  # clip-higher: unlikely tokens may grow more
        "actor_rollout_ref.actor.clip_ratio_c": 10.0,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",  # token-level loss: long responses count in full
        "actor_rollout_ref.actor.use_kl_loss": False,
        "reward.overlong_buffer.enable": True,  # overlong shaping
        "reward.overlong_buffer.penalty_factor": 1.0,
    },
)


@register_adv_est(
    "grpo",
    reads=("norm_adv_by_std_in_grpo",),
    presets={"grpo": GRPO, "drgrpo": DRGRPO, "dapo": DAPO},
    compares_group=True,
    several_rows="sample",
    per_response=True,
    kl_belongs_in_loss=True,
)
def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = EPSILON,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask.

    `index` names the group of each row (the `uid` array). Either the argument or `config` can switch
    `norm_adv_by_std_in_grpo` off.
    """
    group_B = group_of_rows(index, len(token_level_rewards), "grpo")
    scores_B = outcome_scores(token_level_rewards)
    # Tutorials pass the flag as an argument, runs in the config: both must allow it.
    normalise = norm_adv_by_std_in_grpo and read_setting(config, "norm_adv_by_std_in_grpo", True)
    advantages_B = normalised(scores_B, group_B, epsilon) if normalise else above_mean(scores_B, group_B)
    advantages_BT = on_every_token(advantages_B, token_level_rewards, response_mask)
    return advantages_BT, advantages_BT
