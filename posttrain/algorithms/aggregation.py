"""Aggregation of token losses: weights per token with loss = (weights * token losses).sum().

The weights are computed from counts of the whole mini-batch, so that its parts (micro-batches, ranks) can be computed
separately and added: no split changes the gradient. Rows without any response token do not count.

A response is a sample. Where a conversation with several branches ended in several rows, these count as one response:
the `seq-mean` modes divide by the number of samples, and the mean over the tokens of a response is over all its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from posttrain.algorithms.common import AlgorithmError, keep_masked, unknown_name
from posttrain.lazy import torch

Count: TypeAlias = "int | float | torch.Tensor"


@dataclass(frozen=True)
class Counts:
    """Trained tokens and samples of the whole mini-batch, those of each row's sample, and DrGRPO's constant."""

    tokens: torch.Tensor
    samples: torch.Tensor
    length_B1: torch.Tensor
    constant: float


def token_mean(mask_BT: torch.Tensor, counts: Counts) -> torch.Tensor:
    """`token-mean`: sum of all token losses / number of tokens in the mini-batch. The default.

    Every token weighs the same, so long responses weigh more than short ones (DAPO, arXiv 2503.14476). Steady for
    long reasoning.
    """
    return mask_BT / counts.tokens


def token_sum(mask_BT: torch.Tensor, counts: Counts) -> torch.Tensor:
    """`token-sum`: sum of all token losses.

    Not normalised: the gradient grows with the batch and with the length of the responses, so learning rate and
    grad_clip must match them.
    """
    return mask_BT


def seq_mean_token_sum(mask_BT: torch.Tensor, counts: Counts) -> torch.Tensor:
    """`seq-mean-token-sum`: sum of the token losses of each response, then the mean over responses.

    Every token weighs the same, whatever the length of its response; the gradient grows with length.
    """
    return mask_BT / counts.samples


def seq_mean_token_mean(mask_BT: torch.Tensor, counts: Counts) -> torch.Tensor:
    """`seq-mean-token-mean`: mean over the tokens of each response, then the mean over responses.

    The original GRPO paper's way (arXiv 2402.03300). Unstable for long reasoning: a token of a long response weighs
    less, so long wrong answers are penalised less per token and answers grow longer (arXiv 2503.20783). Prefer
    `token-mean` or `seq-mean-token-sum-norm` there.
    """
    return mask_BT / counts.length_B1.clamp(min=1) / counts.samples


def seq_mean_token_sum_norm(mask_BT: torch.Tensor, counts: Counts) -> torch.Tensor:
    """`seq-mean-token-sum-norm`: sum of the token losses of each response / one constant, then the mean over responses.

    DrGRPO's way (arXiv 2503.20783): no bias by length, and a row's share does not depend on other rows' lengths. The
    constant is actor_rollout_ref.actor.loss_scale_factor, or data.max_response_length if that is null.
    """
    return mask_BT / (counts.constant * counts.samples)


AGGREGATION_MODES: dict[str, Callable[[torch.Tensor, Counts], torch.Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def sample_lengths(response_mask: torch.Tensor, sample_B: torch.Tensor | None = None) -> torch.Tensor:
    """Return (samples,) the tokens of each; `sample_B` is the number of each row's sample, None if each row is one."""
    length_B = response_mask.bool().sum(dim=-1)
    if sample_B is None:
        return length_B
    return torch.zeros_like(length_B).index_add_(0, sample_B.to(length_B.device), length_B)


def mask_counts(response_mask: torch.Tensor, sample_B: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, samples with at least one token); add these over the parts of a mini-batch."""
    length_S = sample_lengths(response_mask, sample_B)
    return length_S.sum(), (length_S > 0).sum()


def aggregation_weights(
    response_mask: torch.Tensor,
    mode: str,
    *,
    loss_scale_factor: float | None = None,
    total_tokens: Count | None = None,
    total_rows: Count | None = None,
    sample_B: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return weights (rows, length) with loss == (weights * token losses).sum(), 0 outside the mask.

    `total_tokens` and `total_rows` (samples) are the counts of the whole mini-batch if `response_mask` is a part of it.
    `sample_B` is the number of each row's sample; None if each row is one.
    `loss_scale_factor` is the constant of `seq-mean-token-sum-norm`, and only of that mode.
    """
    if mode not in AGGREGATION_MODES:
        raise unknown_name("loss aggregation", mode, AGGREGATION_MODES, "It is set by `loss_agg_mode`.")
    # A run fills in data.max_response_length; this error is for calls from Python.
    if mode == "seq-mean-token-sum-norm" and (loss_scale_factor is None or loss_scale_factor <= 0):
        raise AlgorithmError(
            f"`seq-mean-token-sum-norm` divides by a constant above 0, but `loss_scale_factor` is {loss_scale_factor}. "
            "Set actor_rollout_ref.actor.loss_scale_factor (customary: data.max_response_length)."
        )
    # Observation tokens and padding get weight 0: only tokens that the policy wrote are trained.
    mask_BT = response_mask.bool().to(dtype or torch.float32)
    own_tokens, own_rows = mask_counts(response_mask, sample_B)
    # At least 1: a part without tokens must give 0, not 0/0.
    tokens, rows = (
        torch.as_tensor(own if total is None else total, dtype=mask_BT.dtype, device=mask_BT.device).clamp(min=1)
        for own, total in ((own_tokens, total_tokens), (own_rows, total_rows))
    )
    length_B1 = mask_BT.sum(dim=-1, keepdim=True)
    if sample_B is not None:
        length_B1 = sample_lengths(response_mask, sample_B)[sample_B].to(mask_BT.dtype).unsqueeze(-1)
    return AGGREGATION_MODES[mode](mask_BT, Counts(tokens, rows, length_B1, loss_scale_factor or 1.0))


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    *,
    loss_scale_factor: float | None = None,
    total_tokens: Count | None = None,
    total_rows: Count | None = None,
) -> torch.Tensor:
    """Aggregate token losses (rows, length) to one number, in float32 or better."""
    weights_BT = aggregation_weights(
        loss_mask,
        loss_agg_mode,
        loss_scale_factor=loss_scale_factor,
        total_tokens=total_tokens,
        total_rows=total_rows,
        dtype=torch.promote_types(loss_mat.dtype, torch.float32),
    )
    return (weights_BT * keep_masked(loss_mat, loss_mask)).sum()


def token_share(response_mask: torch.Tensor, total_tokens: Count) -> torch.Tensor:
    """Return this part's share of a mini-batch's tokens: the weight of a loss that is already one number."""
    # float64, because the shares of all parts must add up to 1.
    tokens = mask_counts(response_mask)[0].double()
    return tokens / torch.as_tensor(total_tokens, dtype=torch.float64, device=tokens.device).clamp(min=1)
