"""Functions that the policy losses share: a safe log-ratio, the clip range, importance weights, a row's mean.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Any, TypeVar

from posttrain.algorithms.common import AlgorithmError, keep_masked, read_setting
from posttrain.algorithms.registry import own_settings
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

S = TypeVar("S")


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


def loss_settings(kind: type[S], config: Any) -> S:
    """Return a loss's own settings, from the actor's section."""
    return own_settings(kind, read_setting(config, "policy_loss", None), "actor_rollout_ref.actor.policy_loss.")


def detached(metrics: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in metrics.items()}
