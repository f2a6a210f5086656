"""Importance weights made inside the update, where its old policy is the one that is being differentiated.

With one optimizer step on a batch, the old policy's log-probs are those that the update computes anyway: the weights of
`algorithm.rollout_correction` follow from them, and no pass over the batch is made for them. Their diagnostics are
shares of sums over the whole mini-batch, so that no split changes them; two are made of such sums in the end.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.correction import importance, sampled_from
from posttrain.algorithms.kl import MAX_LOG_RATIO
from posttrain.protocol import DataProto
from posttrain.workers.measures import Measures

_WEIGHT, _SQUARE, _GAP = "sum of weights", "sum of squared weights", "sum of log-perplexity gaps"
# Metric -> (the sums that it is made of, and how).
COMBINED = {
    "rollout_is/ess": ((_WEIGHT, _SQUARE), lambda weight, square: weight**2 / max(square, 1e-30)),
    "mismatch/ppl_ratio": ((_GAP,), math.exp),
}


def can_weight_in_update(correction: Any) -> bool:
    """Whether these settings ask for weights alone; what is rejected is decided beforehand."""
    return correction.rollout_is is not None and correction.rollout_rs is None


@torch.no_grad()
def importance_weights(
    log_prob: torch.Tensor, micro: DataProto, correction: Any, measures: Measures
) -> torch.Tensor | None:
    """(rows, length) the weights of a micro-batch without old log-probs; None where there is nothing to weigh."""
    batch = micro.batch
    if not can_weight_in_update(correction) or "old_log_probs" in batch or "rollout_log_probs" not in batch:
        return None
    mask, rollout = batch["response_mask"], sampled_from(batch)
    made = importance(log_prob, rollout, mask, correction)
    assert made is not None
    rows = micro.meta_info["counts"]["total_rows"]
    share = batch["mean_weights"].double() if made.ratio.shape == mask.shape else made.counted.double() / rows
    measures.add("rollout_is/mean", (share * made.ratio).sum())
    measures.most("rollout_is/max", keep_masked(made.ratio, made.counted).max())
    measures.add(f"rollout_is/{made.cut}", (share * made.outside).sum())
    measures.add(_WEIGHT, (share * made.weights).sum())
    measures.add(_SQUARE, (share * made.weights.double() ** 2).sum())
    _mismatch(keep_masked(log_prob - rollout, mask).double(), mask, batch["mean_weights"], rows, measures)
    return keep_masked(made.weights.expand_as(log_prob), mask)


def _mismatch(
    log_ratio: torch.Tensor, mask: torch.Tensor, mean_weights: torch.Tensor, rows: int, measures: Measures
) -> None:
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    measures.add("mismatch/kl", -(mean_weights * log_ratio).sum(), steps="first")
    measures.add("mismatch/k3_kl", (mean_weights * (torch.expm1(limited) - limited)).sum(), steps="first")
    gap_B = -limited.sum(-1) / mask.bool().sum(-1).clamp(min=1)  # trainer less rollout
    measures.add(_GAP, gap_B.sum() / rows, steps="first")


def finish_importance_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of a batch, those that are made of sums in their place."""
    for name, (parts, made_of) in COMBINED.items():
        if all(part in metrics for part in parts):
            metrics[name] = made_of(*(metrics.pop(part) for part in parts))
    return metrics
