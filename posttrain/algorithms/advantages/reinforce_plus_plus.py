"""REINFORCE++: the discounted reward-to-go of every token, normalised over the whole batch. No critic, no groups.

    G_t = r_t + gamma * G_(t+1)
    A_t = (G_t - mean(G)) / sqrt(variance(G) + 1e-8)      over all tokens of the batch; returns = G

Observation tokens are skipped: gamma is not applied across them, and a reward on them counts for the tokens before
them. The turns of a conversation with several branches are read one after the other, as one response.

Source: REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization,
arXiv 2501.03262.

When to use: one response per prompt, many prompts per batch, and rewards that are comparable across prompts (a reward
model). If prompts differ much in difficulty, `reinforce_plus_plus_baseline` with several responses is steadier.

Settings: algorithm=reinforce_pp sets algorithm.adv_estimator=reinforce_plus_plus and KL in the reward
(algorithm.use_kl_in_reward), which is spread over the tokens; algorithm.gamma.

Watch: reward_mean, critic/returns/mean, actor/reward_kl_penalty, actor/grad_norm.

Signs of failure: the difference between easy and hard prompts hides what a response achieved (use a larger batch, or
the variant with a baseline).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import masked_whiten, reward_to_go
from posttrain.algorithms.common import read_setting
from posttrain.algorithms.kl_in_reward import KL_IN_REWARD
from posttrain.algorithms.registry import Preset, register_adv_est
from posttrain.lazy import torch

REINFORCE_PP = Preset(
    "REINFORCE++ (arXiv 2501.03262): rewards normalised over the batch, KL in the reward.",
    {"algorithm.adv_estimator": "reinforce_plus_plus", **KL_IN_REWARD},
)


@register_adv_est("reinforce_plus_plus", reads=("gamma",), presets={"reinforce_pp": REINFORCE_PP}, several_rows="turns")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), each (rows, response length), 0 outside the mask."""
    gamma = float(read_setting(config, "gamma", 1.0))
    returns_BT = reward_to_go(token_level_rewards, response_mask, gamma)
    dtype = token_level_rewards.dtype
    return masked_whiten(returns_BT, response_mask).to(dtype), returns_BT.to(dtype)
