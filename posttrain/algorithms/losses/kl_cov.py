"""KL-Cov: keeps the tokens that would reduce the entropy most near the old policy, with a KL penalty.

    cov_t = (A_t - mean(A)) * (log_prob_t - mean(log_prob))       means over all tokens of the mini-batch
    loss  = -A * ratio, and + ppo_kl_coef * |log_prob - old_log_prob| on the share `kl_cov_ratio` of tokens whose cov
            is largest

Like `clip_cov`, but these tokens are slowed down instead of left out, and nothing is clipped. The covariance is
measured once per mini-batch with the old policy's log-probs, over all its tokens, so that no split changes the choice.

Source: The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617.

When to use: as `clip_cov`; steadier for larger models. It needs several updates per batch: with one, the ratio is 1 and
the penalty has no gradient.

Settings: actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov, actor_rollout_ref.actor.policy_loss.kl_cov_ratio,
actor_rollout_ref.actor.policy_loss.ppo_kl_coef. The clip settings have no effect.

Watch: actor/entropy, actor/cov_chosen (share of tokens held back), actor/cov_kl (their mean distance), actor/ppo_kl.

Signs of failure: actor/ppo_kl grows from update to update (nothing is clipped): lower the learning rate or ppo_epochs,
or raise kl_cov_ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import (
    COVARIANCE_METRICS,
    PPO_KL,
    detached,
    mask_of,
    safe_log_ratio,
    token_covariance,
    weighted,
)
from posttrain.algorithms.registry import loss_settings, register_policy_loss
from posttrain.lazy import torch
from posttrain.settings import POSITIVE, POSITIVE_SHARE, setting


@dataclass
class KLCovSettings:
    """The settings of the loss `kl_cov`."""

    kl_cov_ratio: float = setting(0.0002, range=POSITIVE_SHARE)
    """Share of the mini-batch's tokens, those with the largest covariance, that `kl_cov` holds back."""
    ppo_kl_coef: float = setting(0.1, range=POSITIVE)
    """Coefficient of the penalty by which `kl_cov` holds them back."""


METRICS = {
    **PPO_KL,
    **COVARIANCE_METRICS,
    "actor/cov_kl": "Under kl_cov: the KL that the chosen tokens pay.",
}


def choose_tokens(mini_batch: Any, config: Any = None) -> dict[str, torch.Tensor]:
    """Return `chosen`: 1 on the tokens of the mini-batch with the largest covariance."""
    share = loss_settings(KLCovSettings, config).kl_cov_ratio
    covariance, mask = token_covariance(mini_batch)
    count = min(max(1, int(share * int(mask.sum()))), int(mask.sum()))
    # Padding must never be among the largest.
    ranked = covariance.masked_fill(~mask, -torch.inf).flatten()
    return {"chosen": mask_of(torch.topk(ranked, count).indices, mask)}


@register_policy_loss("kl_cov", settings=KLCovSettings, reads=(), metrics=METRICS, prepare=choose_tokens)
def compute_policy_loss_kl_cov(
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
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    held = torch.zeros_like(log_ratio) if chosen is None else chosen.to(log_ratio.dtype)
    # |log-ratio| is the paper's estimate of the KL divergence of a token.
    distance = held * log_ratio.abs()
    losses = -keep_masked(advantages, response_mask) * torch.exp(log_ratio)
    coefficient = loss_settings(KLCovSettings, config).ppo_kl_coef
    losses = weighted(losses + coefficient * distance, rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/cov_chosen": held, "actor/cov_kl": distance})
