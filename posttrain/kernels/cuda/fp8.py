"""Rows rounded to fp8 with a scale each: plain ones, norms, and gated ones, in the pass that makes them.

Rounding in a pass of its own would read and write every activation once more: 2.4 ms of a 7B model's decode step.

Shapes: T tokens, E width of the model, I width of the gated layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.early import _wait, comes_early
from posttrain.kernels.cuda.fused_products import _gate
from posttrain.kernels.quantized import LARGEST, SMALLEST_SCALE, Quantized

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
PIECE = 4096  # numbers of a row that a program takes at once
MOST_PIECES = 5  # that it can hold in registers


@triton.jit
def _scale(largest):
    return tl.maximum(largest / _LARGEST, _SMALLEST_SCALE)


@triton.jit
def _rounded(wide, scale):
    return tl.minimum(tl.maximum(wide / scale, -_LARGEST), _LARGEST).to(tl.float8e4nv)


@triton.jit
def _quantize(X, VALUES, SCALES, size, PIECE: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([PIECE], tl.float32)
    for start in range(0, size, PIECE):
        at = start + tl.arange(0, PIECE)
        x = tl.load(X + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    scale = _scale(tl.max(largest, 0))
    for start in range(0, size, PIECE):  # its second reading comes from the cache
        at = start + tl.arange(0, PIECE)
        x = tl.load(X + row * size + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(VALUES + row * size + at, _rounded(x, scale), mask=at < size)
    tl.store(SCALES + row, scale)


def quantize_rows(x: torch.Tensor, into: Quantized | None = None) -> Quantized:
    """The last dimension's rows, (..., E)."""
    into = into or Quantized.like(x)
    assert x.is_contiguous()
    rows, size, early = into.scales.numel(), x.shape[-1], comes_early(x.device)
    if rows:
        piece = min(PIECE, triton.next_power_of_2(size))
        _quantize[(rows,)](
            x, into.values, into.scales, size, piece, early, num_warps=4 if piece <= 1024 else 8, launch_pdl=early
        )
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
    wide = (wide * inverse * weight).to(x.dtype).to(tl.float32)  # rounded first as the norm without fp8 is
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
    """The same with the whole row in registers, so that gates are computed once: half of the time at 7B."""
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
