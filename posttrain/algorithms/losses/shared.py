"""Functions that several policy losses share: a safe log-ratio, the clip range, importance weights, a row's mean; the
covariance of advantage and log-prob (`clip_cov`, `kl_cov`), and the trust region of `dppo_tv` and `dppo_kl`.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import AlgorithmError, keep_masked, masked_mean, read_setting, without_gradient
from posttrain.lazy import torch

# exp(20) is about 5e8: beyond every useful ratio, and far from overflow in float32.
MAX_LOG_RATIO = 20.0

# The settings that `clip_sides` and `ratio_range` read; `clip_ratio_c` is for the dual clip.
CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

PPO_KL = {
    "actor/ppo_kl": """\
Mean of old_log_prob - log_prob: how far the updates on this batch have moved the policy. 0 at the first update.""",
}
CLIP_FRACTION = {
    "actor/pg_clipfrac": """\
Share of tokens whose ratio lies outside the clip range on the side where clipping acts: they have no gradient. 0 at the
first update of a batch. Growing beyond about 0.2: the updates are too large; lower the learning rate or ppo_epochs.""",
}


def safe_log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log_prob - old_log_prob within +-20 (no gradient beyond), 0 outside the mask."""
    # Masked before clamping, so that NaN in padding becomes 0 and gets no gradient.
    return keep_masked(log_prob - old_log_prob, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted(losses: torch.Tensor, rollout_is_weights: torch.Tensor | None, mask: torch.Tensor) -> torch.Tensor:
    """Multiply losses by importance weights, which carry no gradient (see `rollout_correction`)."""
    if rollout_is_weights is None:
        return losses
    return losses * keep_masked(rollout_is_weights, mask).detach()


def row_mean(values_BT: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (B, 1) the mean over each row's own tokens; it depends on no other row, so packing does not change it."""
    return keep_masked(values_BT, mask).sum(-1, keepdim=True) / mask.bool().sum(-1, keepdim=True).clamp(min=1)


def clip_sides(config: Any) -> tuple[float, float]:
    """Return (low, high): `clip_ratio_low` and `clip_ratio_high`, each `clip_ratio` if it is not set."""
    both = read_setting(config, "clip_ratio", 0.2)
    low, high = read_setting(config, "clip_ratio_low", both), read_setting(config, "clip_ratio_high", both)
    if low < 0 or high < 0:
        raise AlgorithmError(
            f"The clip range is {low} below and {high} above: actor_rollout_ref.actor.clip_ratio, clip_ratio_low and "
            "clip_ratio_high must not be negative."
        )
    return low, high


def ratio_range(config: Any) -> tuple[float, float]:
    """Return (low, high) for clipping the ratio to 1 - low ... 1 + high."""
    low, high = clip_sides(config)
    if low > 1:
        raise AlgorithmError(
            f"The clip range is 1-{low} to 1+{high}. Set actor_rollout_ref.actor.clip_ratio, or clip_ratio_low "
            "(0 to 1) and clip_ratio_high (0 or more)."
        )
    return low, high


def detached(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in metrics.items()}


COVARIANCE_METRICS = {
    "actor/cov_chosen": "Under clip_cov and kl_cov: share of tokens chosen for their covariance with the advantage.",
}


@without_gradient
def token_covariance(mini_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantage - mean) * (log-prob - mean) of each token (rows, length), and the mask.

    The log-probs are the old policy's; with one update per batch, where none were computed, the rollout's.
    """
    batch = mini_batch.batch
    mask = batch["response_mask"].bool()
    # With one update per batch the rollout's log-probs are those of the current policy.
    name = "old_log_probs" if "old_log_probs" in batch else "rollout_log_probs"
    centred = [value - masked_mean(value, mask) for value in (batch["advantages"].double(), batch[name].double())]
    return centred[0] * centred[1], mask


def mask_of(flat_places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `like`'s shape with 1 at these places of its flattened form."""
    marks = torch.zeros(like.numel(), device=like.device)
    marks[flat_places] = 1
    return marks.view(like.shape)


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
