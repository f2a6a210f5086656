"""ReMax: each response is compared with the reward of the greedy response to the same prompt.

    G_t = r_t + r_(t+1) + ...                       reward still to come from token t on
    A_t = G_t - reward of the greedy response       returns = G

The trainer generates and scores one greedy response per prompt; it is not trained on. Rewards placed on tokens that the
policy did not write count for the tokens before them.

Source: ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models,
arXiv 2310.10505.

When to use: only one sampled response per prompt is affordable, so there is no group to compare, and you do not want a
critic. It needs no second model, but one more response per prompt.

Settings: algorithm=remax sets algorithm.adv_estimator=remax, actor_rollout_ref.rollout.n=1 and KL in the reward
(algorithm.use_kl_in_reward). With n above 1, all responses to a prompt share one greedy baseline.

Watch: remax/baseline_mean (the greedy reward, should rise) with reward_mean, timing_s/greedy, actor/entropy.

Signs of failure: almost all advantages are 0 or negative (sampling is far worse than greedy: lower the temperature);
the greedy reward rises while the sampled one does not.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.advantages.groups import reward_to_go
from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.algorithms.kl_in_reward import KL_IN_REWARD
from posttrain.algorithms.registry import Preset, register_adv_est
from posttrain.lazy import torch

REMAX = Preset(
    "ReMax (arXiv 2310.10505): against the greedy response, KL in the reward.",
    {"algorithm.adv_estimator": "remax", "actor_rollout_ref.rollout.n": 1, **KL_IN_REWARD},
)


@register_adv_est(
    "remax",
    reads=(),
    metrics={"remax/baseline_mean": "Mean reward of the greedy responses that `remax` compares with."},
    presets={"remax": REMAX},
    needs_greedy_baseline=True,
    several_rows="turns",
)
def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    reward_baselines: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), each (rows, response length), 0 outside the mask; `reward_baselines` is (rows,)."""
    rows = len(token_level_rewards)
    if reward_baselines is None or reward_baselines.shape != (rows,):
        given = "none" if reward_baselines is None else f"shape {tuple(reward_baselines.shape)}"
        raise AlgorithmError(
            f"`remax` needs `reward_baselines`, the greedy response's reward for each of the {rows} rows; got {given}."
        )
    returns_BT = reward_to_go(token_level_rewards, response_mask)
    # The same baseline for every token: the greedy response has no counterpart of a token.
    baseline_B1 = reward_baselines.to(returns_BT).unsqueeze(-1)
    advantages_BT = keep_masked(returns_BT - baseline_B1, response_mask)
    return advantages_BT.to(token_level_rewards.dtype), returns_BT.to(token_level_rewards.dtype)
