"""Log-probs and entropies of given tokens from hidden states, without holding tokens x vocabulary logits.

logp = log-softmax(hidden @ weight.T / temperature)[label]; entropy = -sum(p * log p) of the same distribution.
The forward pass walks over chunks of tokens and keeps two numbers per token; the backward pass computes each chunk's
logits again, except for those that a CUDA device has room for.

Shapes: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from posttrain.kernels import cuda
from posttrain.kernels.gradient_sums import add_product
from posttrain.kernels.ordered import ordered_product, token_log_probs

CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MiB in float32
DEVICE_SHARE = 1 / 64  # of a CUDA device's memory for the logits of a chunk; products of fewer tokens leave it idle
KEPT_SHARE = 1 / 16  # of it for logits that are kept for the backward pass instead of being computed twice


def chunk_elements(device: torch.device) -> int:
    """Logits held at once."""
    if device.type != "cuda":
        return CHUNK_ELEMENTS
    return max(CHUNK_ELEMENTS, int(torch.cuda.get_device_properties(device).total_memory * DEVICE_SHARE / 4))


def _chunks(tokens: int, vocabulary: int, device: torch.device) -> list[slice]:
    size = max(1, chunk_elements(device) // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _scores(hidden_NE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, temperature: float):
    # Logits over the temperature, in float32 or better.
    return _wide(_logits(hidden_NE, weight_VE, bias_V)).div_(temperature)


def _logits(hidden_NE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, exact: bool = False):
    if exact:
        return ordered_product(hidden_NE, weight_VE, bias_V)
    logits = hidden_NE @ weight_VE.T
    return logits if bias_V is None else logits + bias_V


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _statistics(logits_NV: torch.Tensor, labels_N: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    # (log-probs, entropies, log-sum-exps): from the last two the backward pass rebuilds all probabilities.
    found = token_log_probs(logits_NV, labels_N, temperature)
    if found is not None:
        return found
    scores = _wide(logits_NV).div_(temperature)
    logsumexp = scores.logsumexp(-1)
    probs = (scores - logsumexp[:, None]).exp_()
    logps = scores.gather(1, labels_N[:, None]).squeeze(1) - logsumexp
    return logps, logsumexp - (probs * scores).sum(-1), logsumexp


class _LogProbHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, bias_V, labels_N, temperature, chunks, exact):
        parts = []
        for part in chunks:
            logits = _logits(hidden_NE[part], weight_VE, bias_V, exact)
            parts.append(_statistics(logits, labels_N[part], temperature))
        logp_N, entropy_N, logsum_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.chunks, ctx.temperature = chunks, temperature
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, labels_N, logsum_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NE, weight_VE, bias_V, labels_N, logsumexp_N, entropy_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden_NE) if need_hidden else None
        wide = torch.promote_types(weight_VE.dtype, torch.float32)  # sums over chunks are rounded once, at the end
        grad_weight = torch.zeros_like(weight_VE, dtype=wide) if need_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=wide) if need_bias else None
        for part in ctx.chunks:
            grad_scores = _grad_scores(
                _scores(hidden_NE[part], weight_VE, bias_V, ctx.temperature),
                labels_N[part],
                logsumexp_N[part],
                entropy_N[part],
                grad_logp_N[part],
                grad_entropy_N[part],
            ).div_(ctx.temperature)
            narrow = grad_scores.to(hidden_NE.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ weight_VE
            if grad_weight is not None:
                grad_weight += (narrow.T @ hidden_NE[part]).to(wide)
            if grad_bias is not None:
                grad_bias += grad_scores.sum(0)
        as_weight = grad_weight.to(weight_VE.dtype) if grad_weight is not None else None
        as_bias = grad_bias.to(bias_V.dtype) if grad_bias is not None else None
        return grad_hidden, as_weight, as_bias, None, None, None, None


class _CudaHead(torch.autograd.Function):
    # The same with Triton between the products. The matrix units sum in float32 anyway, and their logits are kept so:
    # nothing is rounded before the softmax.
    @staticmethod
    def forward(ctx, hidden_NE, weight_VE, labels_N, temperature, chunks, keep, exact=False):
        from posttrain.kernels.cuda.logprob import statistics

        parts, ctx.kept = [], []
        for part in chunks:
            logits = wide_product(hidden_NE[part], weight_VE.T)
            found = statistics(logits, labels_N[part], temperature)
            if exact:
                from posttrain.kernels.cuda.ordered import label_log_probs

                found = (label_log_probs(logits, labels_N[part], temperature), *found[1:])
            parts.append(found)
            if len(ctx.kept) < keep:
                ctx.kept.append(logits)
            del logits  # or it would still be held while the next chunk is made, and the peak be two chunks
        logp_N, entropy_N, logsum_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.chunks, ctx.temperature, ctx.weight_VE = chunks, temperature, weight_VE
        ctx.save_for_backward(hidden_NE, labels_N, logsum_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logp_N, grad_entropy_N):  # pyright: ignore[reportIncompatibleMethodOverride]
        from posttrain.kernels.cuda.logprob import gradient

        hidden_NE, labels_N, logsum_N, entropy_N = ctx.saved_tensors
        weight_VE = ctx.weight_VE
        grad_hidden = torch.empty_like(hidden_NE) if ctx.needs_input_grad[0] else None
        grad_weight = None
        for number, part in enumerate(ctx.chunks):
            kept = number < len(ctx.kept)
            logits = ctx.kept[number] if kept else wide_product(hidden_NE[part], weight_VE.T)
            columns = [x[part] for x in (labels_N, logsum_N, entropy_N, grad_logp_N, grad_entropy_N)]
            grad = gradient(logits, columns, ctx.temperature, hidden_NE.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight_VE, out=grad_hidden[part])
            if ctx.needs_input_grad[1] and not add_product((weight_VE,), grad, hidden_NE[part]):
                share = wide_product(grad.T, hidden_NE[part])
                grad_weight = share if grad_weight is None else grad_weight.add_(share)
            if kept:
                ctx.kept[number] = None  # freed as soon as it is used
            del logits, grad
        ctx.kept = []
        as_weight = grad_weight.to(weight_VE.dtype) if grad_weight is not None else None
        return grad_hidden, as_weight, None, None, None, None, None


def kept_chunks(sizes: Sequence[int], most: float) -> int:
    """How many of the first chunks may be kept if at most `most` is held at once: all, or so many that there is room
    for another one beside them."""
    if sum(sizes) <= most:
        return len(sizes)
    return sum(1 for end in accumulate(sizes) if end + max(sizes) <= most)


def _may_keep(chunks: Sequence[slice], weight_VE: torch.Tensor) -> int:
    memory = torch.cuda.get_device_properties(weight_VE.device).total_memory
    return kept_chunks([4 * len(weight_VE) * (part.stop - part.start) for part in chunks], memory * KEPT_SHARE)


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.dtype is torch.float32:
        return left @ right
    return torch.mm(left, right, out_dtype=torch.float32)  # pyright: ignore


def _grad_scores(scores, labels, logsumexp, entropy, grad_logp, grad_entropy) -> torch.Tensor:
    # d logp / d score = onehot - p; d entropy / d score = -p * (log p + entropy).
    log_p = scores.sub_(logsumexp[:, None])
    p = log_p.exp()
    grad = p * -(grad_logp[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None]))
    return grad.scatter_add_(1, labels[:, None], grad_logp[:, None])


def logprob_head(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias_V: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs, entropies), each (N,), in float32 or better. With `exact`, log-probs have the bits that
    decoding gives them (`ordered.py`)."""
    chunks = _chunks(hidden_NE.shape[0], weight_VE.shape[0], hidden_NE.device)
    if not chunks:
        empty = hidden_NE.sum(-1).to(torch.promote_types(hidden_NE.dtype, torch.float32))
        return empty, empty
    if cuda.runs_here(hidden_NE) and bias_V is None:
        # Asked here, because inside the autograd function weights need a gradient even under no_grad: log-probs held
        # 7.2 GiB of logits that no backward pass would use.
        backward = torch.is_grad_enabled() and (hidden_NE.requires_grad or weight_VE.requires_grad)
        keep = _may_keep(chunks, weight_VE) if backward else 0
        return _CudaHead.apply(hidden_NE, weight_VE, labels_N, temperature, chunks, keep, exact)  # pyright: ignore
    return _LogProbHead.apply(hidden_NE, weight_VE, bias_V, labels_N, temperature, chunks, exact)  # pyright: ignore
