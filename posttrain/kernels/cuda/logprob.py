"""Statistics of logits and their gradient, one token per program; `posttrain.kernels.logprob_head` makes the chunks.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def _statistics(LOGITS, LABELS, LOGP, ENTROPY, LOGSUM, V, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = LOGITS + row.to(tl.int64) * V
    # One pass over the vocabulary (online softmax): each of the BLOCK lanes keeps its own maximum, its sum of
    # exponentials over it and its sum weighted by the logits; lanes are joined at the end.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(best, x)
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # -inf - -inf would be NaN
        fade, p = tl.exp(best - safe), tl.exp(x - safe)
        total = total * fade + p
        weighted = weighted * fade + tl.where(at < V, p * x, 0.0)
        best = higher
    top = tl.max(best, 0)
    share = tl.exp(best - top)
    total_all = tl.sum(total * share, 0)
    logsum = top + tl.log(total_all)
    label = tl.load(LABELS + row)
    tl.store(LOGP + row, tl.load(base + label).to(tl.float32) * inverse - logsum)
    tl.store(ENTROPY + row, logsum - tl.sum(weighted * share, 0) / total_all)
    tl.store(LOGSUM + row, logsum)


def statistics(logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """(log-probs of the labels, entropies, logarithms of sums), of the tempered distributions."""
    rows, size = logits_NV.shape
    found = tuple(torch.empty(rows, dtype=torch.float32, device=logits_NV.device) for _ in range(3))
    _statistics[(rows,)](logits_NV, labels_N, *found, size, 1.0 / temperature, 4096, num_warps=8)
    return found


@triton.jit
def _gradient(LOGITS, LABELS, LOGSUM, ENTROPY, GRAD_LOGP, GRAD_ENTROPY, OUT, V, inverse, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    base = row.to(tl.int64) * V
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < V
    log_p = tl.load(LOGITS + base + at, mask=real, other=0.0).to(tl.float32) * inverse - tl.load(LOGSUM + row)
    grad_logp, grad_entropy = tl.load(GRAD_LOGP + row), tl.load(GRAD_ENTROPY + row)
    # p is rebuilt from the logits and their log-sum, so that no probabilities are kept between the passes.
    grad = -tl.exp(log_p) * (grad_logp + grad_entropy * (log_p + tl.load(ENTROPY + row)))
    grad = (grad + tl.where(at == tl.load(LABELS + row), grad_logp, 0.0)) * inverse
    tl.store(OUT + base + at, grad.to(OUT.dtype.element_ty), mask=real)


def gradient(
    logits_NV: torch.Tensor, columns: Sequence[torch.Tensor], temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of the logits, in `dtype`: d logp = onehot - p; d entropy = -p * (log p + entropy).

    `columns`: labels, logarithms of sums, entropies, and the gradients of log-probs and entropies.
    """
    rows, size = logits_NV.shape
    out = torch.empty(rows, size, dtype=dtype, device=logits_NV.device)
    tensors = (logits_NV, *(column.contiguous() for column in columns), out)
    _gradient[(rows, triton.cdiv(size, 4096))](*tensors, size, 1.0 / temperature, 4096, num_warps=8)
    return out
