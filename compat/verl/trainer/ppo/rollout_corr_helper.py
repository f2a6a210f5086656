"""The gap between rollout and trainer: importance weights, rejection, and how large it is.

Weights and rules are those of `posttrain.algorithms.correction`, which algorithm.rollout_correction trains with;
metrics have verl's names.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from posttrain.algorithms import correction
from posttrain.algorithms.correction import rejection_rules
from posttrain.config.choices import REJECTIONS
from verl.utils.torch_functional import masked_mean, masked_sum

SAFETY_BOUND = 20.0
SUPPORTED_ROLLOUT_RS_OPTIONS: set[str] = set(REJECTIONS)
TOKEN_LEVEL_ROLLOUT_RS_OPTIONS: set[str] = {name for name in REJECTIONS if name.startswith("token_")}


def compute_rollout_correction_weights(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: Any = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(weights exp(log_ratio) per token or per response, bounded; metrics). A threshold `low_high` leaves out instead
    of bounding; `rollout_is_batch_normalize` divides by the weights' mean."""
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"Unsupported rollout_is: {rollout_is}; it is token or sequence")
    if isinstance(rollout_is_threshold, bool):
        raise TypeError("rollout_is_threshold is a number or low_high, not a boolean")
    config = {"rollout_is": rollout_is, "rollout_is_threshold": rollout_is_threshold}
    made = correction.importance(log_ratio, torch.zeros_like(log_ratio), response_mask, config)
    assert made is not None
    mask = response_mask.to(log_ratio.dtype)
    weights, raw = (one.expand_as(log_ratio) * mask for one in (made.weights, made.ratio))
    low, high = correction.bounds_of(rollout_is_threshold, "rollout_is_threshold")
    own = (log_ratio * mask).sum(-1) if rollout_is == "sequence" else log_ratio
    metrics = compute_is_metrics(weights, raw, own, response_mask, rollout_is, high, low)
    if low is not None:
        metrics["rollout_is_oob_ratio"] = float(masked_mean(made.outside.expand_as(mask).float(), response_mask))
    if rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = made.mean()
        weights = weights / made.mean()
    return weights, metrics


def compute_is_metrics(
    rollout_is_weights: torch.Tensor,
    raw_rollout_is_weights: torch.Tensor,
    log_ratio_for_metrics: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
) -> dict[str, float]:
    """How the weights are spread, how many ratios were out of bounds, and how many samples they are worth.

    `raw_rollout_is_weights` are the ratios before bounding; `log_ratio_for_metrics` is per token, or per response.
    """
    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token")
    high = rollout_is_threshold
    low = 1.0 / high if rollout_is_threshold_lower is None else rollout_is_threshold_lower
    there, weights = response_mask.bool(), rollout_is_weights
    if rollout_is == "sequence":
        ratio, count = log_ratio_for_metrics.clamp(max=SAFETY_BOUND).exp(), None
        most, least = ratio.max(), ratio.min()
    else:
        ratio, count = raw_rollout_is_weights, response_mask
        most, least = weights[there].max(), weights[there].min()
    above, below = ((ratio > high).float(), (ratio < low).float())
    bounded = weights.clamp(0.0, high)
    mean, square = masked_mean(bounded, response_mask), masked_mean(bounded.square(), response_mask)
    own_B = masked_mean(weights, response_mask, axis=-1)
    raw_B = masked_mean(raw_rollout_is_weights, response_mask, axis=-1)
    metrics = {
        "rollout_is_mean": masked_mean(weights, response_mask),
        "rollout_is_max": most,
        "rollout_is_min": least,
        "rollout_is_ratio_fraction_high": above.mean() if count is None else masked_mean(above, count),
        "rollout_is_ratio_fraction_low": below.mean() if count is None else masked_mean(below, count),
        "rollout_is_std": (square - mean.square()).clamp(min=0).sqrt() if there.sum() > 1 else mean.new_zeros(()),
        "rollout_is_eff_sample_size": (mean + 1e-8).square() / square.clamp(min=1e-30),
        "rollout_is_seq_mean": own_B.mean(),
        "rollout_is_seq_std": own_B.std() if own_B.numel() > 1 else mean.new_zeros(()),
        "rollout_is_seq_max": own_B.max(),
        "rollout_is_seq_min": own_B.min(),
        "rollout_is_seq_max_deviation": (own_B - 1.0).abs().max(),
        "rollout_is_seq_fraction_high": (raw_B > high).float().mean(),
        "rollout_is_seq_fraction_low": (raw_B < low).float().mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def compute_rollout_rejection_mask(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: Any = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """(the mask without what the rules reject, metrics). One threshold may serve several rules.

    verl compares `k1` as rollout over trainer, posttrain's training as trainer over rollout: the same for a range that
    is its own reciprocal, such as 0.5_2.0.
    """
    names = [name.strip() for name in rollout_rs.split(",")]
    if isinstance(rollout_rs_threshold, str) and "," not in rollout_rs_threshold:
        rollout_rs_threshold = ",".join([rollout_rs_threshold] * len(names))
    elif isinstance(rollout_rs_threshold, int | float):
        rollout_rs_threshold = ",".join([str(rollout_rs_threshold)] * len(names))
    there = response_mask.bool()
    kept, metrics = there.clone(), {}
    for rule in rejection_rules(rollout_rs, rollout_rs_threshold):
        value = _statistic(rule.name, log_ratio, response_mask)
        low, high = (math.log(rule.low), math.log(rule.high)) if rule.low else (None, rule.high)
        inside = (value <= high) if low is None else (value <= high) & (value >= low)
        kept &= inside
        metrics |= {
            f"rollout_rs_{rule.name}_{name}": number
            for name, number in _spread(value, ~inside, response_mask, low, high).items()
        }
    metrics["rollout_rs_masked_fraction"] = float(masked_mean((~kept).float(), response_mask))
    metrics["rollout_rs_seq_masked_fraction"] = float((there & ~kept).any(-1).float().mean())
    return response_mask * kept.to(response_mask.dtype), metrics


def _statistic(name: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows, length) what the rule compares, the same for all tokens of a response unless it is one of tokens."""
    level, kind = name.rsplit("_", 1)
    gap = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    values = {"k1": -gap, "k2": 0.5 * gap**2, "k3": gap.exp() - 1 - gap}[kind]
    if level == "token":
        return values
    if level == "seq_max":  # never negative, so that what is outside the mask cannot be the largest
        return (values * mask).amax(-1, keepdim=True).expand_as(values)
    of_response = masked_sum if level == "seq_sum" else masked_mean
    return of_response(values, mask, axis=-1)[:, None].expand_as(values)


def _spread(
    value: torch.Tensor, outside: torch.Tensor, mask: torch.Tensor, low: float | None, high: float
) -> dict[str, float]:
    """How a rule's statistic is spread over tokens and over responses, and what lies outside."""
    there, rows = mask.bool(), mask.bool().any(-1)
    own_B = masked_mean(value, mask, axis=-1)[rows]
    bounded = value.clamp(0.0 if low is None else low, high)
    variance = masked_mean(bounded.square(), mask) - masked_mean(bounded, mask).square()
    below = torch.zeros_like(value) if low is None else (value < low).float()
    made = {
        "mean": masked_mean(value, mask),
        "max": value[there].max(),
        "min": value[there].min(),
        "fraction_high": masked_mean((value > high).float(), mask),
        "fraction_low": masked_mean(below, mask),
        "std": variance.clamp(min=0).sqrt(),
        "seq_mean": own_B.mean(),
        "seq_std": own_B.std() if own_B.numel() > 1 else own_B.new_zeros(()),
        "seq_max": own_B.max(),
        "seq_min": own_B.min(),
        "seq_max_deviation": own_B.abs().max(),
        "seq_fraction_high": (own_B > high).float().mean(),
        "seq_fraction_low": own_B.new_zeros(()) if low is None else (own_B < low).float().mean(),
        "masked_fraction": masked_mean(outside.float(), mask),
        "seq_masked_fraction": (there & outside).any(-1)[rows].float().mean(),
    }
    return {name: float(number) for name, number in made.items()}


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    response_mask: torch.Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: Any = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: Any = None,
) -> tuple[Any, torch.Tensor, dict[str, float]]:
    """(a DataProto with `rollout_is_weights` or None, the mask that is left, metrics named `rollout_corr/...`)."""
    from verl.protocol import DataProto

    if not response_mask.any():
        raise ValueError("response_mask must contain at least one valid token")
    log_ratio = old_log_prob - rollout_log_prob
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    weights, mask = None, response_mask
    if rollout_is is not None:
        made, found = compute_rollout_correction_weights(
            log_ratio, response_mask, rollout_is, rollout_is_threshold, rollout_is_batch_normalize
        )
        weights, metrics = DataProto.from_dict({"rollout_is_weights": made}), metrics | found
    if rollout_rs is not None:
        mask, found = compute_rollout_rejection_mask(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
        metrics |= found
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def compute_offpolicy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor | None, response_mask: torch.Tensor
) -> dict[str, Any]:
    """Perplexities of both, their KL (k1 and k3), and the spread of the ratio (chi-squared)."""
    assert response_mask.any(), "Expected at least one valid token in response_mask"
    trainer_B = masked_mean(old_log_prob, response_mask, axis=-1)
    metrics = {"training_ppl": (-trainer_B).exp().mean(), "training_log_ppl": (-trainer_B).mean()}
    if rollout_log_prob is not None:
        log_ratio = old_log_prob - rollout_log_prob
        limited = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
        rollout_B = masked_mean(rollout_log_prob, response_mask, axis=-1)
        gap_B = rollout_B - trainer_B
        whole_B = masked_sum(log_ratio, response_mask, axis=-1).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        metrics |= {
            "kl": masked_mean(-log_ratio, response_mask),
            "k3_kl": masked_mean(log_ratio.exp() - log_ratio - 1, response_mask),
            "rollout_ppl": (-rollout_B).exp().mean(),
            "rollout_log_ppl": (-rollout_B).mean(),
            "log_ppl_diff": gap_B.mean(),
            "log_ppl_abs_diff": gap_B.abs().mean(),
            "log_ppl_diff_max": gap_B.max(),
            "log_ppl_diff_min": gap_B.min(),
            "ppl_ratio": gap_B.exp().mean(),
            "chi2_token": masked_mean((2 * limited).exp(), response_mask) - 1,
            "chi2_seq": (2 * whole_B).exp().mean() - 1,
        }
    return {name: float(value) for name, value in metrics.items()}
