"""Between the matrix products of a decode step: norms, gating, rotated heads, and keys and values into the cache.

Shapes: T tokens, E width of the model, I width of the gated layer, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early


@triton.jit
def _add_rms_norm(
    RES, ADD, WEIGHT, OUT, size, epsilon, HAS_ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        _wait()
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(RES + row + at, mask=real, other=0.0)
    if HAS_ADD:
        x = (x.to(tl.float32) + tl.load(ADD + row + at, mask=real, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(RES + row + at, x, mask=real)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + row + at, (wide * inverse * weight).to(x.dtype), mask=real)


def norm_warps(block: int) -> int:
    """Warps that norm a row of so many numbers."""
    # The sum with the residual is stored in place, so every number must belong to one thread. With more warps than
    # these some would hold the same numbers, and one could read a sum that another has already stored.
    return 1 if block <= 256 else 4 if block <= 2048 else 8


def add_rms_norm(
    residual_TE: torch.Tensor, added_TE: torch.Tensor | None, weight_E: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """The norm of `residual + added`; the sum stays in `residual`."""
    out = torch.empty_like(residual_TE)
    tokens, size = residual_TE.shape
    block = triton.next_power_of_2(size)
    early = comes_early(residual_TE.device)
    if tokens:
        _add_rms_norm[(tokens,)](
            residual_TE, added_TE, weight_E, out, size, epsilon, added_TE is not None, block, early,
            num_warps=norm_warps(block), launch_pdl=early,
        )  # fmt: skip
    return out


@triton.jit
def _rms_norm(
    X, WEIGHT, OUT, stride, size, epsilon, SHIFTED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(X + row * stride + at, mask=real, other=0.0)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    if SHIFTED:
        weight += 1.0
    if ROUNDED:
        wide = wide.to(x.dtype).to(tl.float32)
    tl.store(OUT + row * size + at, (wide * weight).to(x.dtype), mask=real)


def rms_norm(
    x_TE: torch.Tensor, weight_E: torch.Tensor, epsilon: float, *, shifted: bool = False, rounded: bool = False
) -> torch.Tensor:
    """The norm of rows, which may be columns of wider ones. `shifted`: weights count from -1. `rounded`: the
    normalised row is rounded to its type before it is multiplied with the weight."""
    tokens, size = x_TE.shape
    out, early = x_TE.new_empty(tokens, size), comes_early(x_TE.device)
    if tokens:
        assert x_TE.stride(1) == 1
        block = triton.next_power_of_2(size)
        _rms_norm[(tokens,)](
            x_TE, weight_E, out, x_TE.stride(0), size, epsilon, shifted, rounded, block, early,
            num_warps=norm_warps(block), launch_pdl=early,
        )  # fmt: skip
    return out


@triton.jit
def _silu_mul(GATE_UP, OUT, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    gate = tl.load(GATE_UP + row * 2 * size + at, mask=real, other=0.0)
    up = tl.load(GATE_UP + row * 2 * size + size + at, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + row * size + at, (silu * up.to(tl.float32)).to(gate.dtype), mask=real)


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows that hold both."""
    tokens, both = gate_up_T2I.shape
    out = gate_up_T2I.new_empty(tokens, both // 2)
    if tokens:
        _silu_mul[(tokens, triton.cdiv(both // 2, 1024))](gate_up_T2I, out, both // 2, 1024, num_warps=4)
    return out


@triton.jit
def _heads(X, NORM, COS, SIN, at, other, first, real, d, d_other, epsilon, D: tl.constexpr, NORMED: tl.constexpr,
           ROTATED: tl.constexpr):  # fmt: skip
    # Normed and rotated: x * cos + half_turn(x) * sin, rounded after each operation as torch does. `other` is the
    # number of the other half of the head that is rotated together with `at`.
    x = tl.load(X + at, mask=real, other=0.0)
    y = tl.load(X + other, mask=real, other=0.0)
    if NORMED:
        wide = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 1) / D + epsilon)[:, None]
        x = (wide * inverse * tl.load(NORM + d, mask=d < D, other=0.0).to(tl.float32)).to(x.dtype)
        y = (y.to(tl.float32) * inverse * tl.load(NORM + d_other, mask=d < D, other=0.0).to(tl.float32)).to(x.dtype)
    if ROTATED:
        cos = tl.load(COS + d, mask=d < D, other=0.0).to(x.dtype).to(tl.float32)
        sin = tl.load(SIN + d, mask=d < D, other=0.0).to(x.dtype).to(tl.float32)
        turned = tl.where(first, -y.to(tl.float32), y.to(tl.float32))
        cosine, sine = (x.to(tl.float32) * cos).to(x.dtype), (turned * sin).to(x.dtype)
        x = (cosine.to(tl.float32) + sine.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _rotate_and_store(
    Q, K, V, OUT, KEYS, VALUES, POSITIONS, SLOTS, COS, SIN, Q_NORM, K_NORM, epsilon,
    q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DP)[None, :]
    first = d < D // 2
    d_other = tl.where(first, d + D // 2, d - D // 2)
    position = tl.load(POSITIONS + token).to(tl.int64)
    cos, sin = COS, SIN
    if ROTATED:
        cos, sin = COS + position * D, SIN + position * D
    h, k = tl.arange(0, HP)[:, None], tl.arange(0, KP)[:, None]
    q_real, k_real = (h < H) & (d < D), (k < KV) & (d < D)
    base = token * q_row + h * q_head
    x = _heads(Q, Q_NORM, cos, sin, base + d, base + d_other, first, q_real, d, d_other, epsilon, D, NORMED, ROTATED)
    tl.store(OUT + token * (H * D) + h * D + d, x, mask=q_real)
    slot = tl.load(SLOTS + token)
    if slot >= 0:  # below 0 there is no place to store it
        k_base = token * k_row + k * k_head
        key = _heads(K, K_NORM, cos, sin, k_base + d, k_base + d_other, first, k_real, d, d_other, epsilon, D, NORMED,
                     ROTATED)  # fmt: skip
        into = ((slot // BLOCK) * KV + k) * (BLOCK * D) + (slot % BLOCK) * D + d
        tl.store(KEYS + into, key, mask=k_real)
        tl.store(VALUES + into, tl.load(V + token * v_row + k * v_head + d, mask=k_real, other=0.0), mask=k_real)


def rotate_and_store(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> torch.Tensor:
    """The queries, (T, H, D), rotated; keys and values go to their slots (block x BLOCK + place; none below 0)."""
    tokens, heads, size = query_THD.shape
    key_heads = key_TKD.shape[1]
    assert all(x.stride(-1) == 1 for x in (query_THD, key_TKD, value_TKD))
    out = query_THD.new_empty(tokens, heads, size)
    cosine, sine = rotation or (None, None)
    query_norm, key_norm = norms or (None, None)
    strides = [stride for x in (query_THD, key_TKD, value_TKD) for stride in x.stride()[:2]]
    two = triton.next_power_of_2
    if tokens:
        _rotate_and_store[(tokens,)](
            query_THD, key_TKD, value_TKD, out, *cache, positions_T, slots_T, cosine, sine, query_norm, key_norm,
            epsilon, *strides, heads, key_heads, size, two(heads), two(key_heads), two(size), cache[0].shape[2],
            norms is not None, rotation is not None, num_warps=4,
        )  # fmt: skip
    return out
