"""How far the rollout's probabilities are from the trainer's."""

from __future__ import annotations

from typing import Any

import torch

_PREFIX = "training/rollout_"


def calculate_token_list_diff(tensor1: torch.Tensor, tensor2: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(rows,) how many tokens under the mask differ."""
    return ((tensor1 != tensor2.to(tensor1.device)) & (mask.to(tensor1.device) == 1)).sum(dim=1)


def pearson_correlation_coefficient(tensor1: torch.Tensor, tensor2: torch.Tensor, mask: torch.Tensor) -> float:
    """The correlation of two tensors under a mask; 0 where their shapes differ."""
    if not tensor1.shape == tensor2.shape == mask.shape:
        return 0
    return float(torch.corrcoef(torch.stack([tensor1[mask.bool()], tensor2[mask.bool()]]))[0, 1])


def calculate_log_prob_diff(log_probs1: torch.Tensor, log_probs2: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The distances under the mask, one after the other."""
    return (log_probs1 - log_probs2).abs()[mask.bool()]


def calculate_debug_metrics(data: Any) -> dict[str, float]:
    """Largest, mean and deviation of |p_rollout - p_trainer| over the response's tokens, and their correlation."""
    batch = data.batch
    rollout, trainer = batch["rollout_log_probs"].exp(), batch["old_log_probs"].exp()
    name = next((name for name in ("response_mask", "attention_mask") if name in batch.keys()), None)
    mask = torch.ones_like(rollout) if name is None else batch[name][:, -batch["responses"].shape[1] :]
    gaps = calculate_log_prob_diff(rollout, trainer, mask)
    nothing = not gaps.numel()
    measured = [float("nan")] * 3 if nothing else [float(gaps.max()), float(gaps.mean()), float(gaps.std())]
    return {
        f"{_PREFIX}probs_diff_valid": 0 if nothing else 1,
        f"{_PREFIX}probs_diff_max": measured[0],
        f"{_PREFIX}probs_diff_mean": measured[1],
        f"{_PREFIX}probs_diff_std": measured[2],
        f"{_PREFIX}actor_probs_pearson_corr": (
            float("nan") if nothing else pearson_correlation_coefficient(trainer, rollout, mask)
        ),
    }
