"""DRO (direct reward optimisation): policy gradient with a quadratic penalty on the log-ratio instead of a clip.

    loss = -A * log_prob + beta / 2 * (log_prob - old_log_prob)^2

The penalty is symmetric, its gradient grows with the distance, and no token loses its gradient: at log-ratio A / beta
penalty and advantage balance.

Source: Offline Regularised Reinforcement Learning for Large Language Models Alignment, arXiv 2405.19107; used online in
Kimi k1.5: Scaling Reinforcement Learning with LLMs, arXiv 2501.12599. The papers write it for whole responses; here it
acts per token, as in common implementations.

When to use: off-policy or offline responses, where ratios are far from 1 and a clip would drop most tokens.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=dro, actor_rollout_ref.actor.policy_loss.dro_beta. The clip
settings have no effect.

Watch: actor/dro_penalty, actor/ppo_kl, reward_mean.

Signs of failure: the penalty outweighs the policy loss (lower dro_beta); actor/ppo_kl keeps growing (raise it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import PPO_KL, detached, safe_log_ratio, weighted
from posttrain.algorithms.registry import loss_settings, register_policy_loss
from posttrain.lazy import torch
from posttrain.settings import POSITIVE, setting


@dataclass
class DROSettings:
    """The settings of the loss `dro`."""

    dro_beta: float = setting(1.0, range=POSITIVE)
    """Coefficient of the quadratic penalty of `dro`."""


METRICS = {
    **PPO_KL,
    "actor/dro_penalty": "Under dro: the quadratic penalty that keeps the policy near the old one.",
}


@register_policy_loss("dro", settings=DROSettings, reads=(), metrics=METRICS, has_ratio=False)
def compute_policy_loss_dro(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    beta = loss_settings(DROSettings, config).dro_beta
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    # Quadratic in the log-ratio, so doubling and halving a probability cost the same.
    penalty = 0.5 * beta * log_ratio**2
    losses = -keep_masked(advantages, response_mask) * keep_masked(log_prob, response_mask) + penalty
    losses = weighted(losses, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/dro_penalty": penalty})
