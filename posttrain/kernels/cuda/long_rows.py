"""Attention of long rows in training, by cuDNN, which is faster there than torch's variable-length flash attention.

Every row is a causal call of its own, lengthened to a multiple of STRIDE, so that cuDNN makes few execution plans. No
token of a row sees what follows the row's end, and what is computed there is dropped. Behind a row are the next row's
tokens, or spare rows after the last one, for which a caller may have made room (`spare_rows`), so that nothing is
copied: with rows of 16,383 tokens, copies in every layer and logits computed twice were 5 % of an update.

Shapes: T packed tokens and spare rows, H heads, D head size, L tokens of one lengthened row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

LONG = 4096  # tokens of a row from which cuDNN is used
STRIDE = 512
SIZES = (64, 128)  # head sizes for which cuDNN has forward and backward

_aten = torch.ops.aten


def takes(size: int, lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths, all of the pass, with heads of this size, are better computed here."""
    # cuDNN's backward pass adds in any order, so deterministic runs use the flash kernels.
    return size in SIZES and min(lengths) >= LONG and not torch.are_deterministic_algorithms_enabled()


def spare_rows(lengths: Sequence[int]) -> int:
    """Rows behind the last token that let the last row be lengthened in place. They must hold finite numbers."""
    return -lengths[-1] % STRIDE


def _row(x_THD: torch.Tensor, start: int, length: int) -> torch.Tensor:
    # (1, H, L, D): one row, lengthened in place, or padded by a copy if the tensor ends before.
    end = start + length + -length % STRIDE
    row = x_THD[start:end]
    return (F.pad(row, (0, 0, 0, 0, 0, end - len(x_THD))) if end > len(x_THD) else row).transpose(0, 1)[None]


def _row_and_zeros(x_THD: torch.Tensor, start: int, length: int) -> torch.Tensor:
    # With zeros behind: gradients of other rows' tokens would be added to those of this row's keys.
    more = -length % STRIDE
    row = x_THD[start : start + length]
    if more:
        row = torch.cat([row, row.new_zeros(more, *row.shape[1:])])
    return row.transpose(0, 1)[None]


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def attention_forward(query_THD, key_TKD, value_TKD, lengths: Sequence[int], scale: float):
    """(outputs (T, H, D), logarithms of sums, flat, and state for the backward pass, by row)."""
    outs, logsums, states = [], [], []
    for start, length in zip(_starts(lengths), lengths, strict=True):
        query, key, value = (_row(x, start, length) for x in (query_THD, key_TKD, value_TKD))
        found, logsum, ends_q, ends_k, longest_q, longest_k, *state, _ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scale
        )
        last = start + length == sum(lengths)
        outs.append(found[0].transpose(0, 1)[: len(query_THD) - start if last else length])
        logsums.append(logsum.flatten())
        states.append((logsum.shape, state, (ends_q, ends_k, longest_q, longest_k)))
    return _together(outs), _together(logsums), states


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def attention_backward(grad_THD, query_THD, key_TKD, value_TKD, out_THD, logsum, lengths: Sequence[int], scale, states):
    """Gradients of query, key and value, of all tokens but not of spare rows."""
    grads = []
    sums = logsum.split([shape.numel() for shape, _, _ in states])
    for start, length, part, (shape, state, ends) in zip(_starts(lengths), lengths, sums, states, strict=True):
        query, key, value, out = (_row(x, start, length) for x in (query_THD, key_TKD, value_TKD, out_THD))
        found = _aten._scaled_dot_product_cudnn_attention_backward(
            _row_and_zeros(grad_THD, start, length), query, key, value, out, part.view(shape), *state, None, *ends, 0.0,
            True, scale=scale,
        )  # fmt: skip
        grads.append([one[0].transpose(0, 1)[:length] for one in found])
    query, key, value = (_together(list(parts)) for parts in zip(*grads, strict=True))
    return query, key, value
