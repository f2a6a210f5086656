"""The rollout correction in an update: importance weights and rejection for the actor's loss, and their metrics.

Where they are made depends on the old log-probs:

    the trainer's             before the update, from the whole mini-batch: old / rollout
    none (one optimizer step) in every micro-batch, from the policy that is differentiated: it is the old one
    the rollout's (bypass)    in every micro-batch: current / rollout. The ratio of a loss already is this one, so that
                              weights are measured and not applied; a loss without a ratio is multiplied by them.

A row's weights do not depend on other rows, so no pass over the batch is needed for those that an update makes. Weights
of mean 1 (`rollout_is_batch_normalize`) do: in bypass mode the mini-batch is computed once more, without gradient,
before its update. Diagnostics are shares of sums over the whole mini-batch; two are combined from such sums in the end.

Shapes: b rows of a micro-batch, R response width.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from posttrain.algorithms import compute_rollout_correction, correction_is_on, get_policy_loss, sampled_from
from posttrain.algorithms.common import keep_masked
from posttrain.algorithms.correction import Importance, importance, norm_of, reject, rejection_rules, rollout_is_weights
from posttrain.algorithms.kl import MAX_LOG_RATIO
from posttrain.config.root import ActorConfig, RolloutCorrectionConfig
from posttrain.engine.ranks import sum_over_ranks
from posttrain.protocol import DataProto
from posttrain.workers.measures import Measures

_WEIGHT, _SQUARE, _GAP = "sum of weights", "sum of squared weights", "sum of log-perplexity gaps"
# Metric -> (the sums that it is made of, and how).
COMBINED = {
    "rollout_is/ess": ((_WEIGHT, _SQUARE), lambda weight, square: weight**2 / max(square, 1e-30)),
    "mismatch/ppl_ratio": ((_GAP,), math.exp),
}


def can_correct_in_update(correction: RolloutCorrectionConfig) -> bool:
    """Whether an update can make these weights while it computes; those of mean 1 are known only after it."""
    return correction.rollout_is is None or not correction.rollout_is_batch_normalize


def needs_mean_weight(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether the mean of the weights must be computed before every update."""
    return _is_bypassed(actor) and not can_correct_in_update(correction) and not _has_ratio(actor)


def _is_bypassed(actor: ActorConfig) -> bool:
    return actor.old_log_probs == "rollout"


def _has_ratio(actor: ActorConfig) -> bool:
    return get_policy_loss(actor.policy_loss.loss_mode).has_ratio


def weights_before_update(
    batch: Any, actor: ActorConfig, correction: RolloutCorrectionConfig
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """(weights of a whole mini-batch, as far as its old log-probs tell; their diagnostics)."""
    if not correction_is_on(correction) or not {"old_log_probs", "rollout_log_probs"} <= set(batch):
        return None, {}
    old, sampled, mask = batch["old_log_probs"], sampled_from(batch), batch["response_mask"]
    if _is_bypassed(actor):
        # The loss's ratio ends at the rollout's log-probs, which are those before filters and penalties.
        filtered = "sampling_log_probs" in batch and _has_ratio(actor)
        return (rollout_is_weights(old, sampled, mask, correction)[0] if filtered else None), {}
    weights, facts = compute_rollout_correction(old, sampled, mask, correction)
    facts.pop("mismatch/logp_max")  # measured against the policy being trained, by the objective
    return weights, facts


@torch.no_grad()
def weights_in_update(
    log_prob: torch.Tensor,
    micro: DataProto,
    actor: ActorConfig,
    correction: RolloutCorrectionConfig,
    measures: Measures,
    mean_weight: float,
) -> torch.Tensor | None:
    """(b, R) the weights of a micro-batch: those that are known, and those that are made from `log_prob`."""
    batch = micro.batch
    weights = batch.get("rollout_is_weights")
    bypassed = _is_bypassed(actor)
    is_made_here = bypassed or "old_log_probs" not in batch
    if not is_made_here or not correction_is_on(correction) or "rollout_log_probs" not in batch:
        return weights
    mask, rollout = batch["response_mask"], sampled_from(batch)
    # A sequence has one context, so that the rows of a sample are weighted one by one.
    rows = batch["row_count"][0] if "row_count" in batch else micro.meta_info["counts"]["total_rows"]
    made = importance(log_prob, rollout, mask, correction)
    if made is not None:
        share = batch["mean_weights"].double() if made.ratio.shape == mask.shape else made.counted.double() / rows
        _measure_weights(made, share, measures)
        if not (bypassed and _has_ratio(actor)):
            weights = keep_masked((made.weights / mean_weight).expand_as(log_prob), mask)
    rules = rejection_rules(correction.rollout_rs, correction.rollout_rs_threshold)
    if rules:
        found = reject(log_prob, rollout, mask, rules)
        for name, part in found.shares(batch["mean_weights"], rows).items():
            measures.add(name, part)
        weights = found.kept_BT if weights is None else weights * found.kept_BT
    _measure_mismatch(keep_masked(log_prob - rollout, mask).double(), mask, batch["mean_weights"], rows, measures)
    return weights


def mean_weight_over_ranks(log_prob: torch.Tensor | None, batch: Any, correction: RolloutCorrectionConfig) -> float:
    """The mean of a mini-batch's weights. All ranks must call this, with their rows, or None where they have none."""
    sums = torch.zeros(2, dtype=torch.float64)
    if log_prob is not None:
        made = importance(log_prob, sampled_from(batch), batch["response_mask"], correction)
        assert made is not None
        sums[0], sums[1] = keep_masked(made.weights.double(), made.counted).sum(), made.counted.sum()
    # Ranks that compute the same rows together count them equally often, which leaves the mean as it is.
    return norm_of(*sum_over_ranks(sums))


def _measure_weights(made: Importance, share: torch.Tensor, measures: Measures) -> None:
    measures.add("rollout_is/mean", (share * made.ratio).sum())
    measures.most("rollout_is/max", keep_masked(made.ratio, made.counted).max())
    measures.add(f"rollout_is/{made.cut}", (share * made.outside).sum())
    measures.add(_WEIGHT, (share * made.weights).sum())
    measures.add(_SQUARE, (share * made.weights.double() ** 2).sum())


def _measure_mismatch(
    log_ratio: torch.Tensor, mask: torch.Tensor, mean_weights: torch.Tensor, rows: Any, measures: Measures
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
