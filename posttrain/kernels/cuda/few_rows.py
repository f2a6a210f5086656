"""fp8 products of few rows, for decode steps of up to 64 sequences, which take as long as their weights are read.

The matrix units multiply the weight with the rows instead of the rows with the weight: they take 64 rows on the left,
and as few as 8 on the right. Where a weight has too few rows to keep all processors reading, the sum is cut into
parts, which a second kernel adds in a fixed order. On an H200 the four products of a layer of 7B take 79 us at 64 rows,
against 120 by torch's, whose down product alone takes three times as long as its weight is read. In bfloat16 torch's
are as fast as these would be.

Shapes: B rows, E numbers of a row, F rows of the weight, S parts of a sum.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from posttrain.kernels.cuda.early import _wait, comes_early
from posttrain.kernels.cuda.fused_products import _processors
from posttrain.kernels.quantized import Quantized

MOST_ROWS = 64
COLUMNS = 64  # rows of the weight that a program takes
DEPTH = 256  # numbers of a row that it takes at once


@triton.jit
def _product(
    X, W, XS, WS, BIAS, OUT, rows, size,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    column, part = tl.program_id(0) * BN, tl.program_id(1)
    row, n = tl.arange(0, BM), column + tl.arange(0, BN)
    live = row < rows
    acc = tl.zeros([BN, BM], tl.float32)
    for step in range(0, EACH):
        k = (part * EACH + step) * BK
        at = k + tl.arange(0, BK)
        x = tl.load(X + row[:, None] * E + at[None, :], mask=live[:, None] & (at < E)[None, :], other=0.0)
        acc = tl.dot(W.load([column, k]), tl.trans(x), acc)
    there = live[None, :] & (n < size)[:, None]
    if SPLITS > 1:
        into = (part * rows + row)[None, :] * size + n[:, None]
        tl.store(OUT + into, acc, mask=there)
    else:
        acc *= tl.load(XS + row, mask=live, other=0.0)[None, :]
        acc *= tl.load(WS + n, mask=n < size, other=0.0)[:, None]
        if BIAS is not None:
            acc += tl.load(BIAS + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        tl.store(OUT + row[None, :] * size + n[:, None], acc.to(OUT.dtype.element_ty), mask=there)


@triton.jit
def _join(
    PARTS, XS, WS, BIAS, OUT, rows, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        _wait()
    row, n = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = n < size
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(PARTS + (part * rows + row) * size + n, mask=real, other=0.0)
    total *= tl.load(XS + row) * tl.load(WS + n, mask=real, other=0.0)
    if BIAS is not None:
        total += tl.load(BIAS + n, mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + n, total.to(OUT.dtype.element_ty), mask=real)


@cache
def takes(rows: int, device: torch.device) -> bool:
    """Whether a product of so many rows is better computed here."""
    return rows <= MOST_ROWS and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def product(x_BE: Quantized, weight_FE: Quantized, bias_F: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x times the transposed weight, plus the bias."""
    x, weight = x_BE.values, weight_FE.values
    rows, width = x.shape
    size, device = len(weight), x.device
    programs, pieces = triton.cdiv(size, COLUMNS), triton.cdiv(width, DEPTH)
    alone = programs <= _processors(device)  # on its processor: then more of its pieces may be on their way
    splits = max(1, min(4, pieces // 16)) if alone else 1
    stages = 3 if not alone else 4 if splits > 1 else 6
    out = x.new_empty(rows, size, dtype=dtype)
    into = x.new_empty(splits, rows, size, dtype=torch.float32) if splits > 1 else out
    tiles = TensorDescriptor(weight, [size, width], [width, 1], [COLUMNS, DEPTH])
    height, early = max(16, triton.next_power_of_2(rows)), comes_early(device)
    given = (x_BE.scales, weight_FE.scales, bias_F)
    _product[(programs, splits)](
        x, tiles, *given, into, rows, size, width, height, COLUMNS, DEPTH, triton.cdiv(pieces, splits), splits, early,
        num_warps=4, num_stages=stages, launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        _join[(triton.cdiv(size, 1024), rows)](
            into, *given, out, rows, size, splits, 1024, early, num_warps=4, launch_pdl=early
        )
    return out
