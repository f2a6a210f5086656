"""The covariance of advantage and log-prob at each token of a mini-batch, for `clip_cov` and `kl_cov`."""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import masked_mean, without_gradient
from posttrain.lazy import torch

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
