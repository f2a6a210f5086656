"""PPO with GAE: the advantage of a token is how much better the outcome was than the critic expected.

    delta_t = r_t + gamma * V_(t+1) - V_t
    A_t     = delta_t + gamma * lam * A_(t+1)           (V and A are 0 after the last token)
    returns = A + V; then the advantages of the batch are whitened: (A - mean) / sqrt(variance + 1e-8)

Tokens that the policy did not write (tool results, padding) are skipped: the token before them uses the value of the
next token that the policy wrote, and gets any reward placed on them. So it is with the turns of a conversation that
ended in several rows: they follow each other in the order in which they were sampled, whatever row they are in.

Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation, arXiv 1506.02438;
Proximal Policy Optimization Algorithms, arXiv 1707.06347 (the loss is `vanilla`).

When to use: alignment with a learned reward, long dialogues with rewards along the way, or tasks where a prompt cannot
be answered several times. The critic distinguishes the tokens of one response, which `grpo` cannot. It costs a second
model of about the policy's size.

Settings: algorithm.adv_estimator=gae, algorithm.gamma, algorithm.lam (1: returns minus values; lower: less noise, but
more influence of the critic's errors), critic.*, algorithm.use_kl_in_reward with algorithm.kl_ctrl.*

Watch: reward_mean, critic/vf_loss (should fall), critic/vf_clipfrac, actor/ppo_kl, actor/pg_clipfrac.

Signs of failure: the value loss does not fall (raise critic.optim.lr, or start the critic from a better model); the
reward falls as soon as updates begin (the critic is still random: lower actor_rollout_ref.actor.optim.lr).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.advantages.groups import masked_whiten
from posttrain.algorithms.common import AlgorithmError, keep_masked, read_setting
from posttrain.algorithms.kl_in_reward import KL_IN_REWARD
from posttrain.algorithms.registry import Preset, own_settings, register_adv_est
from posttrain.lazy import torch
from posttrain.settings import SHARE, setting


@dataclass
class GAESettings:
    """How far ahead the critic is trusted."""

    lam: float = setting(1.0, range=SHARE)
    """Trade-off between bias and variance in `gae`."""


PPO = Preset(
    "PPO with GAE (arXiv 1707.06347): a critic, KL in the reward.",
    {"algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, **KL_IN_REWARD},
)


@register_adv_est(
    "gae", settings=GAESettings, reads=("gamma",), presets={"ppo": PPO}, needs_critic=True, several_rows="turns"
)
def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor,
    values: torch.Tensor | None = None,
    response_mask: torch.Tensor | None = None,
    gamma: float | None = None,
    lam: float | None = None,
    config: Any = None,
    whiten: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns), each (rows, response length), 0 outside the mask.

    `gamma` and `lam` come from `config` unless given, and default to 1.
    """
    if values is None:
        raise AlgorithmError(
            "The estimator `gae` needs `values`, and this batch has none: a critic must be trained "
            "(critic.*), or choose an estimator without one (algorithm.adv_estimator=grpo)."
        )
    if response_mask is None or not token_level_rewards.shape == values.shape == response_mask.shape:
        shapes = [None if t is None else tuple(t.shape) for t in (token_level_rewards, values, response_mask)]
        raise AlgorithmError(f"`gae` needs rewards, values and response mask of one shape, but got {shapes}.")
    gamma = float(read_setting(config, "gamma", 1.0) if gamma is None else gamma)
    lam = float(own_settings(GAESettings, config).lam if lam is None else lam)

    dtype = torch.promote_types(token_level_rewards.dtype, values.dtype)
    # float64, because the recursion adds up rounding over thousands of tokens.
    values_BT = values.detach().double()
    advantages_BT = _recursion(token_level_rewards.detach().double(), values_BT, response_mask.bool(), gamma, lam)
    returns_BT = keep_masked(advantages_BT + values_BT, response_mask)
    # Returns are not whitened: they are the targets of the critic, which predicts rewards on their own scale.
    if whiten:
        advantages_BT = masked_whiten(advantages_BT, response_mask)
    return advantages_BT.to(dtype), returns_BT.to(dtype)


def _recursion(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, gamma: float, lam: float
) -> torch.Tensor:
    # From the last token to the first. A row's state does not change where its mask is 0.
    advantages_BT = torch.zeros_like(rewards_BT)
    next_value_B = next_advantage_B = unclaimed_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        written_B = mask_BT[:, t]
        reward_B = rewards_BT[:, t] + unclaimed_B
        delta_B = reward_B + gamma * next_value_B - values_BT[:, t]
        next_advantage_B = torch.where(written_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(written_B, values_BT[:, t], next_value_B)
        # A reward on a token that the policy did not write waits for the last token before it that the policy wrote.
        unclaimed_B = torch.where(written_B, torch.zeros_like(reward_B), reward_B)
        advantages_BT[:, t] = torch.where(written_B, next_advantage_B, advantages_BT[:, t])
    return advantages_BT
