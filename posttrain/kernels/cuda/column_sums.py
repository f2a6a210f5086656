"""Sums over rows, in float32 and always in the same order: gradients of biases and of norms' weights.

torch's own reduction gives few programs to few columns, and takes five times as long as reading the rows does.

Shapes: N rows, C columns, P partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTS = 256  # at most; rows of each are summed up by one program


@triton.jit(do_not_specialize=["rows", "each"])
def _sum_rows(X, OUT, rows, columns, each, BN: tl.constexpr, BC: tl.constexpr):
    """Row `part` of OUT is the sum of `each` rows of X."""
    part = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BN, BC], tl.float32)
    first = part * each
    for start in range(0, each, BN):
        n = start + tl.arange(0, BN)
        real = ((n < each) & (first + n < rows))[:, None] & (c < columns)[None, :]
        total += tl.load(X + (first + n)[:, None] * columns + c[None, :], mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + part * columns + c, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=c < columns)


def column_sums(x_NC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(C,) in `dtype`. Many rows are summed up in two steps."""
    rows, columns = x_NC.shape
    if rows > 4 * PARTS:
        each = triton.cdiv(rows, PARTS)
        parts_PC = x_NC.new_empty(triton.cdiv(rows, each), columns, dtype=torch.float32)
        _sum_rows[(len(parts_PC), triton.cdiv(columns, 128))](
            x_NC.contiguous(), parts_PC, rows, columns, each, 16, 128, num_warps=4
        )
        x_NC, rows = parts_PC, len(parts_PC)
    out = x_NC.new_empty(columns, dtype=dtype)
    _sum_rows[(1, triton.cdiv(columns, 32))](x_NC.contiguous(), out, rows, columns, max(1, rows), 256, 32, num_warps=8)
    return out
