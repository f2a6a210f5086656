"""GSPO: one ratio per response, the geometric mean of its tokens' ratios; whole responses are clipped.

    s    = exp(mean over the response's tokens of (log_prob - old_log_prob))
    loss = max(-A * s, -A * clip(s, 1 - low, 1 + high))       on every token of the response

A reward belongs to a whole response, so the ratio that corrects for it is also that of a response. Ratios of single
tokens are noisy, and in mixtures of experts they jump when the routing changes. The gradient of a token is that of s =
(value of s) * p_t / (value of p_t), the paper's GSPO-token, which equals GSPO's if all tokens of a response share one
advantage.

Source: Group Sequence Policy Optimization, arXiv 2507.18071.

When to use: mixtures of experts, long responses, several updates per batch.

Settings: algorithm=gspo sets actor_rollout_ref.actor.policy_loss.loss_mode=gspo, the estimator `grpo`,
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean and the paper's narrow clip
(actor_rollout_ref.actor.clip_ratio_low=0.0003, actor_rollout_ref.actor.clip_ratio_high=0.0004): means of ratios stay
much closer to 1 than ratios of tokens.

Watch: actor/pg_clipfrac (share of tokens in clipped responses; 0.1 to 0.2 is usual, far more than with `vanilla`),
actor/ppo_kl, reward_mean.

Signs of failure: hardly anything is clipped and the policy drifts (the clip range is one for tokens, such as 0.2);
nearly everything is clipped (too many updates per batch).
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.losses.shared import (
    CLIP,
    CLIP_FRACTION,
    PPO_KL,
    detached,
    ratio_range,
    row_mean,
    safe_log_ratio,
    weighted,
)
from posttrain.algorithms.registry import Preset, register_policy_loss
from posttrain.lazy import torch

GSPO = Preset(
    "GSPO (arXiv 2507.18071): GRPO with one ratio per response and a narrow clip.",
    {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 5,
        "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_low": 0.0003,  # means of ratios stay near 1
        "actor_rollout_ref.actor.clip_ratio_high": 0.0004,
        "actor_rollout_ref.actor.use_kl_loss": False,
    },
)


@register_policy_loss(
    "gspo",
    reads=CLIP,
    metrics=PPO_KL | CLIP_FRACTION,
    presets={"gspo": GSPO},
    loss_agg_mode="seq-mean-token-mean",
    clips_ratio=True,
)
def compute_policy_loss_gspo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return per-token losses and per-token metrics, each (rows, response length), 0 outside the mask."""
    low, high = ratio_range(config)
    log_ratio = safe_log_ratio(log_prob, old_log_prob, response_mask)
    advantages = keep_masked(advantages, response_mask)
    own = keep_masked(log_prob - log_prob.detach(), response_mask)  # 0 with the gradient of log_prob
    # The value is the ratio of the response, the gradient that of the token (GSPO-token).
    ratio = torch.exp(row_mean(log_ratio, response_mask).detach() + own)

    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    losses = weighted(torch.maximum(plain, clipped), rollout_is_weights, response_mask)
    return losses, detached({"actor/ppo_kl": -log_ratio, "actor/pg_clipfrac": (clipped > plain).to(losses.dtype)})
