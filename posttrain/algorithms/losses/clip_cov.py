"""Clip-Cov: leaves a few tokens out of the update, chosen from those that would reduce the entropy most.

    cov_t = (A_t - mean(A)) * (log_prob_t - mean(log_prob))       means over all tokens of the mini-batch
    loss  = PPO's clipped loss; 0 on `clip_cov_ratio` of all tokens, drawn from those with lb < cov_t < ub

The policy's entropy falls where likely tokens have high advantages; there cov is large. Leaving out a few of these
tokens keeps exploration alive. The covariance is measured once per mini-batch with the old policy's log-probs, over all
its tokens, so that no split into micro-batches changes the choice.

Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.

When to use: actor/entropy collapses early while the reward stops rising.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov, actor_rollout_ref.actor.policy_loss.clip_cov_ratio,
actor_rollout_ref.actor.policy_loss.clip_cov_lb, actor_rollout_ref.actor.policy_loss.clip_cov_ub,
actor_rollout_ref.actor.clip_ratio.

Watch: actor/entropy (falls more slowly), actor/cov_chosen (share of tokens left out), actor/pg_clipfrac.

Signs of failure: entropy keeps rising (use a smaller clip_cov_ratio); actor/cov_chosen is 0 (no token is between the
bounds because advantages are small: lower clip_cov_lb).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import (
    CLIP,
    CLIP_FRACTION,
    COVARIANCE_METRICS,
    PPO_KL,
    detached,
    mask_of,
    ratio_range,
    safe_log_ratio,
    token_covariance,
    weighted,
)
from posttrain.algorithms.registry import loss_settings, register_policy_loss
from posttrain.lazy import torch
from posttrain.settings import POSITIVE, POSITIVE_SHARE, setting


@dataclass
class ClipCovSettings:
    """The settings of the loss `clip_cov`."""

    clip_cov_ratio: float = setting(0.0002, range=POSITIVE_SHARE)
    """Share of the mini-batch's tokens that `clip_cov` leaves out."""
    clip_cov_lb: float = setting(1.0, range=POSITIVE)
    """Least covariance of a token that `clip_cov` may leave out."""
    clip_cov_ub: float = setting(5.0, range=POSITIVE)
    """Largest covariance of a token that `clip_cov` may leave out."""


METRICS = PPO_KL | CLIP_FRACTION | COVARIANCE_METRICS


def choose_tokens(mini_batch: Any, config: Any = None) -> dict[str, torch.Tensor]:
    """Return `chosen`: 1 on the tokens of the mini-batch that are left out. The draw depends only on the batch."""
    own = loss_settings(ClipCovSettings, config)
    covariance, mask = token_covariance(mini_batch)
    is_candidate = (covariance > own.clip_cov_lb) & (covariance < own.clip_cov_ub) & mask
    candidates = is_candidate.flatten().nonzero().squeeze(-1)
    # The default share is 0.0002: a small mini-batch would otherwise leave out nothing.
    count = max(1, int(own.clip_cov_ratio * int(mask.sum())))
    # Seeded by the step and drawn on the CPU, so that all ranks and a resumed run choose the same tokens.
    generator = torch.Generator().manual_seed(int(mini_batch.meta_info.get("step", 0)))
    picked = candidates[torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)]
    return {"chosen": mask_of(picked, mask)}


@register_policy_loss(
    "clip_cov", settings=ClipCovSettings, reads=CLIP, metrics=METRICS, clips_ratio=True, prepare=choose_tokens
)
def compute_policy_loss_clip_cov(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    chosen: torch.Tensor | None = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask.

    `chosen` (rows, response length) marks the tokens that `choose_tokens` picked in the whole mini-batch.
    """
    low, high = ratio_range(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    ratio = torch.exp(log_ratio)
    advantages = keep_masked(advantages, response_mask)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    left_out = torch.zeros_like(ratio) if chosen is None else chosen.to(ratio.dtype)

    losses = weighted(torch.maximum(plain, clipped) * (1 - left_out), rollout_is_weights, response_mask)
    metrics = {"actor/ppo_kl": -log_ratio, "actor/cov_chosen": left_out}
    metrics["actor/pg_clipfrac"] = (clipped > plain).to(losses.dtype)
    return losses, detached(metrics)
