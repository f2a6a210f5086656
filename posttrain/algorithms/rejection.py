"""Rejects tokens and responses on which rollout and trainer disagree too much: the part of `rollout_correction` that
drops instead of weighting. Its page has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from posttrain.algorithms.common import AlgorithmError, keep_masked, unknown_name, without_gradient
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


@without_gradient
def kept_tokens(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, response_mask: torch.Tensor, rules: list[Rule]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return (1 on kept tokens, 0 on rejected ones and outside the mask; shares that were rejected)."""
    mask_BT = response_mask.bool()
    d_BT = keep_masked(old_log_prob - rollout_log_prob, mask_BT).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kept_BT = mask_BT
    metrics: dict[str, float] = {}
    for rule in rules:
        value = _measure(rule.name, d_BT, mask_BT)
        inside = (value <= rule.high) if rule.low is None else (value <= rule.high) & (value >= rule.low)
        kept_BT = kept_BT & inside
        metrics[f"rollout_rs/{rule.name}"] = _share(~inside.expand_as(mask_BT), mask_BT)
    # Rows that had no response tokens were not rejected.
    lost_rows_B = mask_BT.any(-1) & ~kept_BT.any(-1)
    metrics["rollout_rs/rejected"] = _share(~kept_BT, mask_BT)
    metrics["rollout_rs/rejected_rows"] = _share(lost_rows_B, mask_BT.any(-1))
    return kept_BT.to(torch.float32), metrics


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


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float((part & whole).sum() / whole.sum().clamp(min=1))
