"""fp8 rows with a scale each, rounded in the kernel that computes them (plain rows, norms, gated rows); and products of
few of them.

Rounding in a kernel of its own would read and write every activation once more: 2.4 ms of a 7B model's decode step.

Shapes: T tokens, E width of the model, I width of the gated layer; in products B rows, E numbers of a row, F rows of
the weight, S parts of a sum.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early
from posttrain.kernels.cuda.fused_products import _gate, _processors
from posttrain.kernels.quantized import LARGEST, SMALLEST_SCALE, Quantized

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
PIECE = 4096  # numbers of a row that a program loads at once
MOST_PIECES = 5  # that it can hold in registers


@triton.jit
def _scale(largest):
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)


@triton.jit
def _rounded(wide, scale):
    # Clamped as `round_rows` does it: what is not a number stays so, and an update that is not finite is noticed.
    return tl.clamp(wide / scale, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _piece(X, FACTORS, row, start, size, PIECE: tl.constexpr):
    at = start + tl.arange(0, PIECE)
    x = tl.load(X + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    if FACTORS is not None:
        x *= tl.load(FACTORS + at, mask=at < size, other=0.0)
    return x, at


@triton.jit
def _quantize(X, FACTORS, VALUES, SCALES, size, PIECE: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([PIECE], tl.float32)
    for start in range(0, size, PIECE):
        x, _ = _piece(X, FACTORS, row, start, size, PIECE)
        largest = tl.maximum(largest, tl.abs(x))
    scale = _scale(tl.max(largest, 0))
    for start in range(0, size, PIECE):  # read again, now from the cache: the scale is known only now
        x, at = _piece(X, FACTORS, row, start, size, PIECE)
        tl.store(VALUES + row * size + at, _rounded(x, scale), mask=at < size)
    tl.store(SCALES + row, scale)


def quantize_rows(x: torch.Tensor, into: Quantized | None = None, factors_E: torch.Tensor | None = None) -> Quantized:
    """The last dimension's rows, (..., E); multiplied by `factors` first, if given."""
    into = into or Quantized.like(x)
    assert x.is_contiguous()
    rows, size, early = into.scales.numel(), x.shape[-1], comes_early(x.device)
    if rows:
        piece = min(PIECE, triton.next_power_of_2(size))
        _quantize[(rows,)](
            x, factors_E, *into, size, piece, early, num_warps=4 if piece <= 1024 else 8, launch_pdl=early
        )  # fmt: skip
    return into


@triton.jit
def _add_rms_norm(
    RES, ADD, WEIGHT, VALUES, SCALES, size, epsilon, HAS_ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(RES + row * size + at, mask=real, other=0.0)
    if HAS_ADD:
        x = (x.to(tl.float32) + tl.load(ADD + row * size + at, mask=real, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(RES + row * size + at, x, mask=real)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    wide = (wide * inverse * weight).to(x.dtype).to(tl.float32)  # rounded first, like the norm without fp8
    scale = _scale(tl.max(tl.abs(wide), 0))
    tl.store(VALUES + row * size + at, _rounded(wide, scale), mask=real)
    tl.store(SCALES + row, scale)


def add_rms_norm(
    residual_TE: torch.Tensor, added_TE: torch.Tensor | None, weight_E: torch.Tensor, epsilon: float
) -> Quantized:
    """The norm of `residual + added`; the sum stays in `residual`."""
    out = Quantized.like(residual_TE)
    tokens, size = residual_TE.shape
    block, early = triton.next_power_of_2(size), comes_early(residual_TE.device)
    warps = 1 if block <= 256 else 4 if block <= 2048 else 8  # see elementwise.add_rms_norm
    if tokens:
        _add_rms_norm[(tokens,)](
            residual_TE, added_TE, weight_E, *out, size, epsilon, added_TE is not None, block, early,
            num_warps=warps, launch_pdl=early,
        )  # fmt: skip
    return out


@triton.jit
def _gated_piece(GATE_UP, row, start, size, PIECE: tl.constexpr):
    at = start + tl.arange(0, PIECE)
    gate = tl.load(GATE_UP + row * 2 * size + at, mask=at < size, other=0.0)
    up = tl.load(GATE_UP + row * 2 * size + size + at, mask=at < size, other=0.0)
    return _gate(gate, up, gate.dtype).to(tl.float32), at


@triton.jit
def _silu_mul(GATE_UP, VALUES, SCALES, size, PIECE: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([PIECE], tl.float32)
    for start in range(0, size, PIECE):
        y, _ = _gated_piece(GATE_UP, row, start, size, PIECE)
        largest = tl.maximum(largest, tl.abs(y))
    scale = _scale(tl.max(largest, 0))
    for start in range(0, size, PIECE):
        y, at = _gated_piece(GATE_UP, row, start, size, PIECE)
        tl.store(VALUES + row * size + at, _rounded(y, scale), mask=at < size)
    tl.store(SCALES + row, scale)


@triton.jit
def _silu_mul_at_once(GATE_UP, VALUES, SCALES, size, PIECE: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr):
    # The same with the whole row in registers, so that gates are computed once: half of the time at 7B. The pieces are
    # written out by hand, each in a variable of its own.
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64)
    y0, at0 = _gated_piece(GATE_UP, row, 0, size, PIECE)
    largest = tl.abs(y0)
    if PIECES > 1:
        y1, at1 = _gated_piece(GATE_UP, row, PIECE, size, PIECE)
        largest = tl.maximum(largest, tl.abs(y1))
    if PIECES > 2:
        y2, at2 = _gated_piece(GATE_UP, row, 2 * PIECE, size, PIECE)
        largest = tl.maximum(largest, tl.abs(y2))
    if PIECES > 3:
        y3, at3 = _gated_piece(GATE_UP, row, 3 * PIECE, size, PIECE)
        largest = tl.maximum(largest, tl.abs(y3))
    if PIECES > 4:
        y4, at4 = _gated_piece(GATE_UP, row, 4 * PIECE, size, PIECE)
        largest = tl.maximum(largest, tl.abs(y4))
    scale = _scale(tl.max(largest, 0))
    tl.store(VALUES + row * size + at0, _rounded(y0, scale), mask=at0 < size)
    if PIECES > 1:
        tl.store(VALUES + row * size + at1, _rounded(y1, scale), mask=at1 < size)
    if PIECES > 2:
        tl.store(VALUES + row * size + at2, _rounded(y2, scale), mask=at2 < size)
    if PIECES > 3:
        tl.store(VALUES + row * size + at3, _rounded(y3, scale), mask=at3 < size)
    if PIECES > 4:
        tl.store(VALUES + row * size + at4, _rounded(y4, scale), mask=at4 < size)
    tl.store(SCALES + row, scale)


def silu_mul(gate_up_T2I: torch.Tensor) -> Quantized:
    """silu(gate) * up of rows that hold both."""
    tokens, both = gate_up_T2I.shape
    size, early = both // 2, comes_early(gate_up_T2I.device)
    out = Quantized(
        gate_up_T2I.new_empty(tokens, size, dtype=torch.float8_e4m3fn),
        gate_up_T2I.new_empty(tokens, dtype=torch.float32),
    )
    if tokens:
        piece = min(PIECE, triton.next_power_of_2(size))
        pieces = triton.cdiv(size, piece)
        how = {"num_warps": 8 if piece > 1024 else 4, "launch_pdl": early}
        if pieces <= MOST_PIECES:
            _silu_mul_at_once[(tokens,)](gate_up_T2I, *out, size, piece, pieces, early, **how)
        else:
            _silu_mul[(tokens,)](gate_up_T2I, *out, size, piece, early, **how)
    return out


# -- products of few rows ----------------------------------------------------------------------------------------------
# Decode steps of up to 64 sequences take as long as their weights are read. The matrix units multiply the weight with
# the rows instead of the rows with the weight: they take 64 rows on the left, and as few as 8 on the right. If a weight
# has too few rows to keep all processors reading, the sum is split into parts, which a second kernel adds in a fixed
# order. On an H200 the four products of a layer of 7B take 79 us at 64 rows, against 120 by torch's, whose down product
# alone takes three times as long as its weight is read. In bfloat16 torch's are as fast as these would be.
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
def takes_few_rows(rows: int, device: torch.device) -> bool:
    """Whether a product of so many rows is better computed here."""
    return rows <= MOST_ROWS and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def multiply_few_rows(
    x_BE: Quantized, weight_FE: Quantized, bias_F: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x times the transposed weight, plus the bias."""
    x, weight = x_BE.values, weight_FE.values
    rows, width = x.shape
    size, device = len(weight), x.device
    programs, pieces = triton.cdiv(size, COLUMNS), triton.cdiv(width, DEPTH)
    alone = programs <= _processors(device)  # one program per processor leaves room for more stages of loads
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
