"""Rollout correction: importance weights for the gap between the policy that sampled and the policy that is trained.

    token:     w_t = min(exp(old_log_prob_t - rollout_log_prob_t), threshold)
    sequence:  w   = min(exp(sum_t (old_log_prob_t - rollout_log_prob_t)), threshold), for all tokens of a response

The weights multiply the token losses and carry no gradient. The gap has two causes: a rollout engine that computes
in another precision or with other kernels, and responses that were sampled by older weights.

Source: truncated importance sampling, IMPALA, arXiv 1802.01561.

When to use: a rollout engine with a visible mismatch (see mismatch/k3_kl), or stale responses. `token` has little
noise and some bias; `sequence` is exact up to the truncation but noisy for long responses.

Settings: algorithm.rollout_correction.rollout_is, algorithm.rollout_correction.rollout_is_threshold.

Watch: mismatch/k3_kl, mismatch/logp_max; rollout_is/mean (near 1), rollout_is/max, rollout_is/truncated (share of
truncated weights), rollout_is/ess (effective sample size as a share: 1 is none lost).

Signs of failure: ess far below 1 or many truncated weights: the two policies differ too much to be corrected; sync
weights more often, or compare the engines' precision and temperature.
"""

from __future__ import annotations

from typing import Any

import torch

from posttrain.algorithms.common import AlgorithmError, keep_masked, masked_mean, setting, unknown_name
from posttrain.algorithms.kl import MAX_LOG_RATIO


def compute_rollout_correction(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any = None
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """(weights (rows, length) or None where `rollout_is` is off, diagnostics of mismatch and weights).

    `config` is the section `algorithm.rollout_correction`.
    """
    weights, metrics = rollout_is_weights(old_log_prob, rollout_log_prob, response_mask, config)
    return weights, {**mismatch_metrics(old_log_prob, rollout_log_prob, response_mask), **metrics}


@torch.no_grad()
def rollout_is_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Truncated weights (rows, length), 0 outside the mask, and their diagnostics (mean and max before truncation).

    The weights of a row do not depend on other rows; the diagnostics describe the rows given, so give all of them.
    """
    level, threshold = setting(config, "rollout_is", None), setting(config, "rollout_is_threshold", 2.0)
    if level is None:
        return None, {}
    if threshold <= 0:
        raise AlgorithmError(
            f"algorithm.rollout_correction.rollout_is_threshold is {threshold}; it must be above 0 (customary: 2)."
        )
    log_ratio_BT = keep_masked(old_log_prob - rollout_log_prob, response_mask).to(torch.float32)
    if level == "token":
        log_ratio, counted = log_ratio_BT, response_mask.bool()
    elif level == "sequence":
        log_ratio, counted = log_ratio_BT.sum(-1, keepdim=True), response_mask.bool().any(-1, keepdim=True)
    else:
        hint = "It is set by algorithm.rollout_correction.rollout_is; null switches it off."
        raise unknown_name("level of importance weights", level, ("token", "sequence"), hint)
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    weights = ratio.clamp(max=threshold)
    metrics = _weight_metrics(ratio, weights, counted, threshold)
    return keep_masked(weights.expand_as(log_ratio_BT), response_mask), metrics


def _weight_metrics(
    ratio: torch.Tensor, weights: torch.Tensor, counted: torch.Tensor, threshold: float
) -> dict[str, float]:
    mean_weight = masked_mean(weights.double(), counted)
    mean_square = masked_mean(weights.double() ** 2, counted)
    return {
        "rollout_is/mean": float(masked_mean(ratio.double(), counted)),
        "rollout_is/max": float(keep_masked(ratio, counted).max()),
        "rollout_is/truncated": float(masked_mean((ratio > threshold).double(), counted)),
        "rollout_is/ess": float(mean_weight**2 / mean_square.clamp(min=1e-30)),
    }


@torch.no_grad()
def mismatch_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """How far trainer and rollout disagree on the sampled tokens: KL(rollout against trainer) and the largest gap."""
    log_ratio = keep_masked(old_log_prob - rollout_log_prob, response_mask).double()
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "mismatch/kl": float(masked_mean(-log_ratio, response_mask)),
        "mismatch/k3_kl": float(masked_mean(torch.expm1(limited) - limited, response_mask)),
        "mismatch/logp_max": float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
    }
