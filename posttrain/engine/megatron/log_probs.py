"""Log-probs and entropies of given tokens where every tensor rank holds a part of the vocabulary.

As `kernels/logprob_head.py`, a chunk of tokens at a time: no rank ever has logits of the whole vocabulary. Ranks
exchange the largest score of each token, and then three sums. Shapes: N tokens, E hidden size, V tokens of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from posttrain.kernels.logprob_head import chunk_elements, logprob_head


class _VocabularyParallelHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, labels_N, temperature, chunks, group):
        """`labels_N` are counted from this rank's first token: others are below 0 or V and above."""
        parts = [_statistics(hidden_NE[c], weight_VE, labels_N[c], temperature, group) for c in chunks]
        logp_N, entropy_N, logsum_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.temperature, ctx.chunks, ctx.group = temperature, chunks, group
        ctx.save_for_backward(hidden_NE, weight_VE, labels_N, logsum_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NE, weight_VE, labels_N, logsum_N, entropy_N = ctx.saved_tensors
        wide = torch.promote_types(weight_VE.dtype, torch.float32)
        grad_hidden = torch.empty_like(hidden_NE, dtype=wide)
        grad_weight = torch.zeros_like(weight_VE, dtype=wide)
        for c in ctx.chunks:
            # With p = softmax(s): d log p(label)/ds = onehot - p, and d entropy/ds = -p (log p + entropy). Logits are
            # computed again instead of kept: they are the largest tensor of a pass.
            log_p = _scores(hidden_NE[c], weight_VE, ctx.temperature).sub_(logsum_N[c, None])
            grad = log_p.exp() * -(grad_logp_N[c, None] + grad_entropy_N[c, None] * (log_p + entropy_N[c, None]))
            own = _own(labels_N[c], len(weight_VE))
            grad.scatter_add_(1, labels_N[c].clamp(0, len(weight_VE) - 1)[:, None], (grad_logp_N[c] * own)[:, None])
            narrow = grad.div_(ctx.temperature).to(hidden_NE.dtype)
            grad_hidden[c] = (narrow @ weight_VE).to(wide)
            grad_weight += (narrow.T @ hidden_NE[c]).to(wide)
        dist.all_reduce(grad_hidden, group=ctx.group)  # each rank has the share of its part of the vocabulary
        return grad_hidden.to(hidden_NE.dtype), grad_weight.to(weight_VE.dtype), None, None, None, None


def _scores(hidden_NE: torch.Tensor, weight_VE: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = hidden_NE @ weight_VE.T
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)


def _own(labels_N: torch.Tensor, tokens: int) -> torch.Tensor:
    return (labels_N >= 0) & (labels_N < tokens)


def _statistics(hidden_NE, weight_VE, labels_N, temperature, group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = _scores(hidden_NE, weight_VE, temperature)
    highest_N = scores.amax(-1)
    # The same maximum on all ranks keeps exp() in range and lets sums of powers simply be added.
    dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=group)
    powers = (scores - highest_N[:, None]).exp_()
    said_N = scores.gather(1, labels_N.clamp(0, len(weight_VE) - 1)[:, None]).squeeze(1) * _own(
        labels_N, len(weight_VE)
    )
    # One message for three sums: latency, not size, is what a small message costs.
    sums = torch.stack([powers.sum(-1), (powers * scores).sum(-1), said_N])
    dist.all_reduce(sums, group=group)
    logsum_N = highest_N + sums[0].log()
    return sums[2] - logsum_N, logsum_N - sums[1] / sums[0], logsum_N


def vocabulary_parallel_log_probs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies), each (N,); `weight_VE` is this rank's part, filled up with rows that are no tokens."""
    first = group.rank() * len(weight_VE)
    weight_VE = weight_VE[: max(0, vocabulary - first)]
    if group.size() == 1:
        return logprob_head(hidden_NE, weight_VE, labels_N, temperature=temperature)
    size = max(1, chunk_elements(hidden_NE.device) // len(weight_VE))
    chunks = [slice(start, start + size) for start in range(0, len(hidden_NE), size)]
    return _VocabularyParallelHead.apply(hidden_NE, weight_VE, labels_N - first, temperature, chunks, group)  # pyright: ignore
