"""Attention of long rows in training, by cuDNN: there it is faster than torch's variable-length flash attention.

Every row is a causal call of its own, padded to a multiple of STRIDE so that few plans are made: no token of a row sees
what stands behind the row's end, and what is computed there is dropped. cuDNN's way back adds up in any order, so a
deterministic run takes the flash kernels.

Shapes: T packed tokens, H heads, D head size, L tokens of one padded row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

LONG = 4096  # tokens of a row from which on cuDNN is taken
STRIDE = 512
SIZES = (64, 128)  # of heads for which it has both directions

_aten = torch.ops.aten


def takes(query_THD: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths, all of the pass, are better computed here."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return query_THD.shape[-1] in SIZES and min(lengths) >= LONG and not deterministic


def _row(x_THD: torch.Tensor, start: int, length: int) -> torch.Tensor:
    """(1, H, L, D): one row's heads, padded."""
    row = x_THD[start : start + length]
    more = -length % STRIDE
    return (F.pad(row, (0, 0, 0, 0, 0, more)) if more else row).transpose(0, 1)[None]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def attention_forward(query_THD, key_TKD, value_TKD, lengths: Sequence[int], scale: float):
    """(outputs (T, H, D), logarithms of sums, flat, and what the way back needs besides, by row)."""
    out, logsums, states = torch.empty_like(query_THD, memory_format=torch.contiguous_format), [], []
    for start, length in zip(_starts(lengths), lengths, strict=True):
        query, key, value = (_row(x, start, length) for x in (query_THD, key_TKD, value_TKD))
        found, logsum, ends_q, ends_k, longest_q, longest_k, *state, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scale
        )
        out[start : start + length] = found[0].transpose(0, 1)[:length]
        logsums.append(logsum.flatten())
        states.append((logsum.shape, state, (ends_q, ends_k, longest_q, longest_k)))
    return out, torch.cat(logsums), states


def attention_backward(grad_THD, query_THD, key_TKD, value_TKD, out_THD, logsum, lengths: Sequence[int], scale, states):
    """Gradients of query, key and value."""
    tensors = (query_THD, key_TKD, value_TKD)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
    parts = logsum.split([shape.numel() for shape, _, _ in states])
    for start, length, part, (shape, state, ends) in zip(_starts(lengths), lengths, parts, states, strict=True):
        grad, query, key, value, out = (_row(x, start, length) for x in (grad_THD, *tensors, out_THD))
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, out, part.view(shape), *state, None, *ends, 0.0, True, scale=scale
        )
        for whole, one in zip(grads, found, strict=True):
            whole[start : start + length] = one[0].transpose(0, 1)[:length]
    return grads[0], grads[1], grads[2]
