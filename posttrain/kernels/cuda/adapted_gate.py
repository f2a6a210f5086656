"""The gated part of a layer with adapters; `posttrain.kernels.train` chooses.

A program takes a block of tokens and columns. An adapter adds the product of two thin blocks to it, rounded into the
sum as a separate product would be. So adapters cost no pass of their own over gate and up, the widest tensors.

Shapes: T tokens, I width of the gated layer, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

Factors = tuple[torch.Tensor, torch.Tensor] | None

TOKENS, COLUMNS, WARPS = 64, 64, 4


@triton.jit
def _plus(x, LEFT, RIGHT, left, right_r, right_i, t, i, t_real, i_real, R: tl.constexpr, BLOCK: tl.constexpr):
    # x + left right, rounded to the type of the factors; with R = 0 nothing is compiled in.
    if R > 0:
        kind = LEFT.dtype.element_ty
        for start in tl.static_range(0, R, BLOCK):
            r = start + tl.arange(0, BLOCK)
            a = tl.load(LEFT + t[:, None] * left + r[None, :], mask=t_real[:, None] & (r < R)[None, :], other=0.0)
            b = tl.load(
                RIGHT + r[:, None] * right_r + i[None, :] * right_i, mask=(r < R)[:, None] & i_real[None, :], other=0.0
            )
            x = tl.dot(a, b, x, input_precision="ieee")
        x = x.to(kind).to(tl.float32)
    return x


@triton.jit
def _block(tokens, size, BT: tl.constexpr, BI: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    i = tl.program_id(1) * BI + tl.arange(0, BI)
    return t, i, t < tokens, i < size


@triton.jit
def _gate_and_up(
    GATE_UP, at, size, real, GL, GR, UL, UR, gl, gr_r, gr_i, ul, ur_r, ur_i, t, i, t_real, i_real,
    RG: tl.constexpr, RU: tl.constexpr, BG: tl.constexpr, BU: tl.constexpr,
):  # fmt: skip
    gate = tl.load(GATE_UP + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + at + size, mask=real, other=0.0).to(tl.float32)
    gate = _plus(gate, GL, GR, gl, gr_r, gr_i, t, i, t_real, i_real, RG, BG)
    return gate, _plus(up, UL, UR, ul, ur_r, ur_i, t, i, t_real, i_real, RU, BU)


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    GATE_UP, OUT, GL, GR, UL, UR, tokens, size, gl, gr_r, gr_i, ul, ur_r, ur_i,
    RG: tl.constexpr, RU: tl.constexpr, BG: tl.constexpr, BU: tl.constexpr, BT: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    t, i, t_real, i_real = _block(tokens, size, BT, BI)
    real = t_real[:, None] & i_real[None, :]
    at = t[:, None] * (2 * size) + i[None, :]
    gate, up = _gate_and_up(GATE_UP, at, size, real, GL, GR, UL, UR, gl, gr_r, gr_i, ul, ur_r, ur_i, t, i, t_real,
                            i_real, RG, RU, BG, BU)  # fmt: skip
    kind = OUT.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(OUT + t[:, None] * size + i[None, :], (silu * up).to(kind), mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    GRAD, GATE_UP, PRODUCT, OUT, GL, GR, UL, UR, DL, DR, tokens, size, gl, gr_r, gr_i, ul, ur_r, ur_i, dl, dr_r, dr_i,
    RG: tl.constexpr, RU: tl.constexpr, RD: tl.constexpr, BG: tl.constexpr, BU: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    t, i, t_real, i_real = _block(tokens, size, BT, BI)
    real = t_real[:, None] & i_real[None, :]
    at, one = t[:, None] * (2 * size) + i[None, :], t[:, None] * size + i[None, :]
    grad = tl.load(GRAD + one, mask=real, other=0.0).to(tl.float32)
    gate, up = _gate_and_up(GATE_UP, at, size, real, GL, GR, UL, UR, gl, gr_r, gr_i, ul, ur_r, ur_i, t, i, t_real,
                            i_real, RG, RU, BG, BU)  # fmt: skip
    grad = _plus(grad, DL, DR, dl, dr_r, dr_i, t, i, t_real, i_real, RD, BD)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    kind = OUT.dtype.element_ty
    tl.store(PRODUCT + one, (silu.to(kind).to(tl.float32) * up).to(kind), mask=real)
    tl.store(OUT + at, (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind), mask=real)
    tl.store(OUT + at + size, (grad * silu).to(kind), mask=real)


def _unpacked(*all_factors: Factors) -> tuple[list, list, list, list]:
    # Matrices, strides, ranks and blocks of ranks for the kernels. tl.dot needs at least 16 numbers of a sum.
    matrices, strides, ranks, blocks = [], [], [], []
    for factors in all_factors:
        left_TR, right_RI = factors or (None, None)
        matrices += [left_TR, right_RI]
        if left_TR is None or right_RI is None:
            strides, ranks, blocks = [*strides, 0, 0, 0], [*ranks, 0], [*blocks, 16]
            continue
        assert left_TR.stride(1) == 1
        strides += [left_TR.stride(0), *right_RI.stride()]
        ranks.append(left_TR.shape[1])
        blocks.append(min(32, max(16, triton.next_power_of_2(left_TR.shape[1]))))
    return matrices, strides, ranks, blocks


def _grid(tokens: int, size: int) -> tuple[int, int]:
    return triton.cdiv(tokens, TOKENS), triton.cdiv(size, COLUMNS)


def forward(gate_up_T2I: torch.Tensor, gate: Factors, up: Factors) -> torch.Tensor:
    tokens, size = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
    out = gate_up_T2I.new_empty(tokens, size)
    matrices, strides, ranks, blocks = _unpacked(gate, up)
    _forward[_grid(tokens, size)](
        gate_up_T2I, out, *matrices, tokens, size, *strides, *ranks, *blocks, TOKENS, COLUMNS, num_warps=WARPS
    )
    return out


def backward(
    grad_TI: torch.Tensor, gate_up_T2I: torch.Tensor, gate: Factors, up: Factors, added: Factors
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the product once more, gradient of gate and up)."""
    product, grad = torch.empty_like(grad_TI), torch.empty_like(gate_up_T2I)
    tokens, size = grad_TI.shape
    matrices, strides, ranks, blocks = _unpacked(gate, up, added)
    _backward[_grid(tokens, size)](
        grad_TI, gate_up_T2I, product, grad, *matrices, tokens, size, *strides, *ranks, *blocks, TOKENS, COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    return product, grad
