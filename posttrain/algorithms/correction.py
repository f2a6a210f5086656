"""Rollout correction: importance weights and rejection for the gap between the sampling and the trained policy.

    d_t = old_log_prob_t - rollout_log_prob_t

    weights     token:     w_t = exp(d_t)          sequence:  w = exp(sum of d_t), for all tokens of a response
                threshold C:                       min(w, C)                                   truncated (TIS)
                threshold low_high:                w inside [low, high], 0 outside             masked (IcePop)
                rollout_is_batch_normalize:        w / mean of the mini-batch's w              mean 1
    rejection   k1: exp(d)    k2: d^2 / 2    k3: exp(d) - 1 - d
                token_k*: of each token; seq_sum_k*, seq_mean_k*, seq_max_k*: of a response (for k1: exp of the sum or
                mean of d). Above the threshold the token, or all tokens of the response, get weight 0; k1 must lie
                within [low, high], and one number C means [1 / C, C].

The weights multiply the token losses and carry no gradient; rejected tokens still count in the denominators of losses.
The loss `geo_mean`, which has one ratio per response, uses one weight per response: the geometric mean of its tokens'
weights.

With actor_rollout_ref.actor.old_log_probs=rollout (bypass mode) no old policy is computed: the update compares the
policy that is being trained with the rollout, d_t = log_prob_t - rollout_log_prob_t. A loss with a ratio then has this
ratio in it already, so that importance weights are measured and not applied; rejection acts. The loss `gpg`, which has
no ratio, becomes REINFORCE with importance weights: -A * w * log_prob.

The gap has three causes: a rollout engine with another precision or other kernels, responses sampled with
older weights, and sampling from a restricted distribution: top_p, top_k, min_p or a repetition penalty.
`rollout_log_prob` is the log-prob under the distribution that was sampled from, so all three are covered.

Source: truncated importance sampling: IMPALA, arXiv 1802.01561; masking (IcePop): Every Step Evolves: Scaling
Reinforcement Learning for Trillion-Scale Thinking Model, arXiv 2510.18855.

When to use: a rollout engine with a visible mismatch (see mismatch/k3_kl), or stale responses. `token` has little noise
and some bias; `sequence` is exact up to the truncation, but noisy for long responses. Masking and rejection drop what
truncation would still learn from: for mixtures of experts and long runs. Weights of mean 1 keep the size of the
gradient; without them it shrinks where many weights are truncated or masked.

Settings: algorithm.rollout_correction.rollout_is, algorithm.rollout_correction.rollout_is_threshold (2.0, or 0.5_5.0),
algorithm.rollout_correction.rollout_rs (e.g. seq_mean_k3, or several with commas),
algorithm.rollout_correction.rollout_rs_threshold (one per name),
algorithm.rollout_correction.rollout_is_batch_normalize.

Watch: mismatch/k3_kl, mismatch/logp_max, mismatch/ppl_ratio (perplexity of the trainer over the rollout's, near 1);
rollout_is/mean (near 1), rollout_is/max, rollout_is/truncated and rollout_is/masked (shares out of bounds),
rollout_is/ess (effective sample size as a share: 1 is none lost), rollout_is/norm (the mean that weights were divided
by); rollout_rs/rejected (share of tokens), rollout_rs/rejected_rows.

Signs of failure: ess is far below 1, or many weights are out of bounds: the two policies differ too much to be
corrected. Sync weights more often, or compare the engines' precision and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from posttrain.algorithms.common import (
    AlgorithmError,
    keep_masked,
    masked_mean,
    read_setting,
    unknown_name,
    without_gradient,
)
from posttrain.algorithms.kl import MAX_LOG_RATIO
from posttrain.lazy import torch

REJECTIONS = tuple(
    f"{level}_{kind}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
    if (level, kind) != ("seq_max", "k1")
)
_THRESHOLD = "algorithm.rollout_correction.rollout_rs_threshold"


class Rule(NamedTuple):
    """A named measure and the range in which tokens are kept; `low` is None without a lower bound."""

    name: str
    low: float | None
    high: float


def bounds_of(threshold: Any, key: str) -> tuple[float | None, float]:
    """Return (low or None, high) of a number, of `low_high` as text, or of a pair."""
    parts = threshold.split("_") if isinstance(threshold, str) else threshold
    parts = list(parts) if isinstance(parts, Sequence) else [parts]
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    low, high = (numbers[0], numbers[1]) if len(numbers) == 2 else (None, numbers[0] if len(numbers) == 1 else -1.0)
    if not 0 < high < float("inf") or (low is not None and not 0 <= low < high):
        raise AlgorithmError(
            f"{key} is {threshold!r}; it must be a number above 0, or a range as low_high with 0 <= low < high "
            "(e.g. 0.5_5.0)."
        )
    return low, high


def rejection_rules(names: str | None, thresholds: Any) -> list[Rule]:
    """Parse `rollout_rs` (names separated by commas) and `rollout_rs_threshold` (one per name)."""
    if names is None:
        return []
    chosen = [name.strip() for name in str(names).split(",")]
    for name in chosen:
        if name not in REJECTIONS:
            hint = "They are set by algorithm.rollout_correction.rollout_rs; null switches rejection off."
            raise unknown_name("rejection rule", name, REJECTIONS, hint)
    # A pair given for a single rule is a range, not two thresholds.
    given = [part.strip() for part in thresholds.split(",")] if isinstance(thresholds, str) else [thresholds]
    if isinstance(thresholds, list | tuple) and len(chosen) > 1:
        given = list(thresholds)
    if thresholds is None or len(given) != len(chosen):
        raise AlgorithmError(
            f"algorithm.rollout_correction.rollout_rs={names} needs one threshold per name, but {_THRESHOLD} is "
            f"{thresholds!r}. Customary: 0.5_2.0 for k1, 0.01 for k3 of a response's mean."
        )
    return [_rule(name, threshold) for name, threshold in zip(chosen, given, strict=True)]


def _rule(name: str, threshold: Any) -> Rule:
    low, high = bounds_of(threshold, _THRESHOLD)
    # exp(d) is a ratio, so one threshold C means the symmetric range [1 / C, C].
    if name.endswith("k1"):
        return Rule(name, 1 / high if low is None else low, high)
    if low is not None:
        raise AlgorithmError(f"{_THRESHOLD}: `{name}` is never negative and takes one number, not {threshold!r}.")
    return Rule(name, None, high)


@dataclass
class Rejection:
    """What the rules keep: 1 on kept tokens, 0 on rejected ones and outside the mask; and what each of them rejects."""

    kept_BT: torch.Tensor
    rejected_BT: dict[str, torch.Tensor]
    lost_rows_B: torch.Tensor

    def shares(self, mean_weights_BT: torch.Tensor, rows: float | torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the rejected shares. The weights of a mean over the mini-batch's tokens, and its number of rows, make
        those of micro-batches add up."""
        shares = {f"rollout_rs/{name}": (mean_weights_BT * lost_BT).sum() for name, lost_BT in self.rejected_BT.items()}
        shares["rollout_rs/rejected"] = (mean_weights_BT * (1 - self.kept_BT)).sum()
        return shares | {"rollout_rs/rejected_rows": self.lost_rows_B.sum() / rows}


@without_gradient
def reject(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, rules: list[Rule]
) -> Rejection:
    """Apply the rules. What is kept of a row does not depend on other rows."""
    mask_BT = response_mask.bool()
    d_BT = keep_masked(old_log_prob - rollout_log_prob, mask_BT).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept_BT = mask_BT
    rejected_BT: dict[str, torch.Tensor] = {}
    for rule in rules:
        value = _measure(rule.name, d_BT, mask_BT)
        inside = (value <= rule.high) if rule.low is None else (value <= rule.high) & (value >= rule.low)
        kept_BT = kept_BT & inside
        rejected_BT[rule.name] = ~inside.expand_as(mask_BT)
    # Rows that had no response tokens were not rejected.
    lost_rows_B = mask_BT.any(-1) & ~kept_BT.any(-1)
    return Rejection(kept_BT.to(torch.float32), rejected_BT, lost_rows_B)


def _measure(name: str, d_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    # The rule's number for each token (B, T), or for each response (B, 1).
    level, kind = name.rsplit("_", 1)
    length_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    # k3 as expm1(d) - d: exact near 0, where almost all tokens are.
    value_BT = {"k1": d_BT, "k2": 0.5 * d_BT**2, "k3": torch.expm1(d_BT) - d_BT}[kind]
    # k2 and k3 are never negative, so the zeros of padding cannot be the largest.
    if level == "seq_max":
        return value_BT.amax(-1, keepdim=True)
    if level != "token":
        value_BT = value_BT.sum(-1, keepdim=True) / (length_B1 if level == "seq_mean" else 1)
    # k1 is averaged as a log-ratio and compared as a ratio: a geometric mean.
    return value_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() if kind == "k1" else value_BT


def correction_is_on(config: Any) -> bool:
    """Whether the section `algorithm.rollout_correction` requests weights or rejection."""
    return read_setting(config, "rollout_is", None) is not None or read_setting(config, "rollout_rs", None) is not None


def sampled_from(batch: Any) -> torch.Tensor:
    """Return (rows, length) log-probs of the sampled tokens under the distribution that they were sampled from."""
    # Recorded only if filters or penalties made the sampling distribution differ from the policy.
    return batch["sampling_log_probs"] if "sampling_log_probs" in batch else batch["rollout_log_probs"]


def compute_rollout_correction(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any = None
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Return (weights (rows, length) or None if the correction is off, diagnostics of mismatch, weights and rejection).

    `config` is the section `algorithm.rollout_correction`. Without `rollout_is_batch_normalize` the weights of a row do
    not depend on other rows. With it they do, and diagnostics always describe the given rows: pass a whole mini-batch.
    """
    weights, metrics = rollout_is_weights(old_log_prob, rollout_log_prob, response_mask, config)
    metrics = {**mismatch_metrics(old_log_prob, rollout_log_prob, response_mask), **metrics}
    names, thresholds = (read_setting(config, name, None) for name in ("rollout_rs", "rollout_rs_threshold"))
    rules = rejection_rules(names, thresholds)
    if rules:
        found = reject(old_log_prob, rollout_log_prob, response_mask, rules)
        # Rejection alone is a weight of 0 or 1.
        weights = found.kept_BT if weights is None else weights * found.kept_BT
        mask_BT = response_mask.bool()
        means_BT = mask_BT.double() / mask_BT.sum().clamp(min=1)
        shares = found.shares(means_BT, mask_BT.any(-1).sum().clamp(min=1))
        metrics |= {name: float(share) for name, share in shares.items()}
    return weights, metrics


@dataclass
class Importance:
    """Ratios of the old policy to the rollout's, and their weights: (rows, length), or (rows, 1) for responses.

    `outside` marks ratios out of bounds, `counted` those of real tokens or rows; `cut` says what happens to `outside`.
    """

    ratio: torch.Tensor
    weights: torch.Tensor
    outside: torch.Tensor
    counted: torch.Tensor
    cut: str

    def mean(self) -> float:
        """Return the mean of the bounded weights, which normalised weights are divided by; 1 if all are 0."""
        return norm_of(keep_masked(self.weights.double(), self.counted).sum(), self.counted.sum())


def norm_of(weight_sum: torch.Tensor | float, count: torch.Tensor | float) -> float:
    """Return the mean from a sum and a count, which may be those of several ranks; 1 if all weights are 0."""
    mean = float(weight_sum) / max(float(count), 1.0)
    return mean if mean > 1e-8 else 1.0


@without_gradient
def importance(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> Importance | None:
    """Return bounded weights as `config` requests them, or None. Those of a row do not depend on other rows."""
    level = read_setting(config, "rollout_is", None)
    if level is None:
        return None
    threshold = read_setting(config, "rollout_is_threshold", 2.0)
    low, high = bounds_of(threshold, "algorithm.rollout_correction.rollout_is_threshold")
    # The old policy over the rollout: > 1 where the rollout sampled a token too rarely.
    log_ratio_BT = keep_masked(old_log_prob - rollout_log_prob, response_mask).to(torch.float32)
    if level == "token":
        log_ratio, counted = log_ratio_BT, response_mask.bool()
    elif level == "sequence":
        # The product over the tokens is the exact weight of a response; its noise grows with length.
        log_ratio, counted = log_ratio_BT.sum(-1, keepdim=True), response_mask.bool().any(-1, keepdim=True)
    else:
        hint = "It is set by algorithm.rollout_correction.rollout_is; null switches it off."
        raise unknown_name("level of importance weights", level, ("token", "sequence"), hint)
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    # With one number only large weights are bounded: small ones add no variance.
    outside = (ratio > high) if low is None else (ratio > high) | (ratio < low)
    weights = ratio.clamp(max=high) if low is None else torch.where(outside, torch.zeros_like(ratio), ratio)
    return Importance(ratio, weights, outside, counted, "truncated" if low is None else "masked")


@without_gradient
def rollout_is_weights(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, config: Any
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """Return bounded weights (rows, length), 0 outside the mask, and diagnostics (mean and max before bounding)."""
    made = importance(old_log_prob, rollout_log_prob, response_mask, config)
    if made is None:
        return None, {}
    metrics = _weight_metrics(made.ratio, made.weights, made.counted)
    metrics[f"rollout_is/{made.cut}"] = float(masked_mean(made.outside.double(), made.counted))
    weights = made.weights
    if read_setting(config, "rollout_is_batch_normalize", False):
        metrics["rollout_is/norm"] = made.mean()
        weights = weights / metrics["rollout_is/norm"]
    return keep_masked(weights.expand_as(old_log_prob), response_mask), metrics


def _weight_metrics(ratio: torch.Tensor, weights: torch.Tensor, counted: torch.Tensor) -> dict[str, float]:
    # float64: squares of weights up to exp(20) would lose digits.
    mean_weight = masked_mean(weights.double(), counted)
    mean_square = masked_mean(weights.double() ** 2, counted)
    return {
        "rollout_is/mean": float(masked_mean(ratio.double(), counted)),
        "rollout_is/max": float(keep_masked(ratio, counted).max()),
        # Kish's effective sample size as a share: 1 if all weights are equal.
        "rollout_is/ess": float(mean_weight**2 / mean_square.clamp(min=1e-30)),
    }


@without_gradient
def mismatch_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor
) -> dict[str, float]:
    """Measure the disagreement of trainer and rollout on sampled tokens: KL(rollout || trainer), gap and perplexity."""
    log_ratio = keep_masked(old_log_prob - rollout_log_prob, response_mask).double()
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    length_B = response_mask.bool().sum(-1)
    log_ppl_gap_B = -limited.sum(-1) / length_B.clamp(min=1)  # trainer less rollout
    return {
        "mismatch/kl": float(masked_mean(-log_ratio, response_mask)),
        "mismatch/k3_kl": float(masked_mean(torch.expm1(limited) - limited, response_mask)),
        "mismatch/logp_max": float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
        "mismatch/ppl_ratio": float(masked_mean(log_ppl_gap_B, length_B > 0).exp()),
    }
