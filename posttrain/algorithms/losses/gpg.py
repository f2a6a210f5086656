"""GPG: the plain policy gradient, without ratio and without clip.

    loss = -A * log_prob

It is only right for responses that the current policy sampled: nothing keeps the policy near the one that sampled.
With importance weights and actor_rollout_ref.actor.old_log_probs=rollout it is REINFORCE for responses of another
policy: -A * w * log_prob, where w is the bounded ratio of the current policy to the rollout (see `rollout_correction`).

Source: GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546.

When to use: one update per batch, with the estimator of the same name; as the simplest loss to compare others with.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=gpg, algorithm.adv_estimator=gpg, and
actor_rollout_ref.actor.ppo_mini_batch_size equal to data.train_batch_size with
actor_rollout_ref.actor.ppo_epochs=1. The clip settings have no effect.

Watch: actor/ppo_kl (0: one update per batch), actor/grad_norm, reward_mean.

Signs of failure: actor/ppo_kl is not 0: several updates are made on one batch; use `vanilla` or `cispo`.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import PPO_KL, detached, safe_log_ratio, weighted
from posttrain.algorithms.registry import register_policy_loss
from posttrain.lazy import torch


@register_policy_loss("gpg", reads=(), metrics=PPO_KL, has_ratio=False)
def compute_policy_loss_gpg(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    losses = -keep_masked(advantages, response_mask) * keep_masked(log_prob, response_mask)
    # The ratio below is only a metric: it has no part in the loss.
    losses = weighted(losses, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -safe_log_ratio(log_prob, old_log_prob, response_mask)})
