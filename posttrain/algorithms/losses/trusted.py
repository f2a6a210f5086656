"""The loss that `dppo_tv` and `dppo_kl` share once they have chosen their tokens, and the KL of two outcomes."""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import AlgorithmError, keep_masked, read_setting
from posttrain.algorithms.losses.shared import CLIP_FRACTION, PPO_KL, detached, safe_log_ratio, weighted
from posttrain.lazy import torch

TRUSTED_METRICS = {
    **PPO_KL,
    **CLIP_FRACTION,
    "actor/ratio_bounded": "Share of tokens whose ratio was held at its bound while they still had a gradient.",
}
TINY = 1e-8  # keeps the logarithm finite where a token has become certain


def trusted_losses(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    inside: torch.Tensor,
    config: Any,
    rollout_is_weights: torch.Tensor | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return -A * min(ratio, c) * log_prob on the tokens `inside` the trust region; the ratio carries no gradient."""
    bound = read_setting(config, "clip_ratio_c", 3.0)
    if bound <= 1:
        raise AlgorithmError(f"actor_rollout_ref.actor.clip_ratio_c is {bound}; it must be above 1.")
    log_ratio = safe_log_ratio(log_prob, old_log_prob, mask)
    ratio = torch.exp(log_ratio).detach()
    # Dropped tokens still count in the denominator of the mean, as with PPO's clip.
    kept = keep_masked(inside.to(ratio.dtype), mask)
    losses = weighted(
        -keep_masked(advantages, mask) * ratio.clamp(max=bound) * log_prob * kept, rollout_is_weights, mask
    )
    metrics = {
        "actor/ppo_kl": -log_ratio,
        "actor/pg_clipfrac": keep_masked(1 - kept, mask),
        "actor/ratio_bounded": kept * (ratio > bound),
    }
    return losses, detached(metrics)


def binary_kl(old_log_prob: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """Return KL(old || new) between "this token" and "any other"."""
    # expm1 keeps 1 - p accurate for probabilities near 1.
    old, others_old, others = torch.exp(old_log_prob), -torch.expm1(old_log_prob), -torch.expm1(log_prob)
    return old * (old_log_prob - log_prob) + others_old * torch.log((others_old + TINY) / (others + TINY))
