"""The parts of a decoder layer's training pass between its matrix products; `posttrain.kernels.train` chooses.

Sums and exponentials are in float32, results in the type of the input. `posttrain.models.fused_layer` puts them
together.

Shapes: T packed tokens, H heads of queries, K heads of keys, D head size, E width of the model, I of the gated layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_forward(X, WEIGHT, OUT, INVERSE, size, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    x = tl.load(X + row * size + at, mask=real, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + at, (x * inverse * weight).to(OUT.dtype.element_ty), mask=real)
    tl.store(INVERSE + row, inverse)


def norm_forward(x_TE: torch.Tensor, weight_E: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x) * weight, 1 / rms(x))."""
    out, inverse = torch.empty_like(x_TE), x_TE.new_empty(len(x_TE), dtype=torch.float32)
    block = triton.next_power_of_2(x_TE.shape[1])
    _norm_forward[(len(x_TE),)](
        x_TE, weight_E, out, inverse, x_TE.shape[1], epsilon, block, num_warps=1 if block <= 256 else 4
    )
    return out, inverse


@triton.jit
def _norm_backward(
    GRAD, X, WEIGHT, INVERSE, ADDED, GRAD_X, PARTS, tokens, size, each, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < size
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    zero = tl.full([], 0, tl.int64)
    for token in range(program * each, tl.minimum((program + 1) * each, tokens)):
        base = (zero + token) * size + at
        x = tl.load(X + base, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + base, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE + token)
        normed = x * inverse
        part += grad * normed
        weighted = grad * weight
        grad_x = (weighted - normed * (tl.sum(weighted * normed, 0) / size)) * inverse
        if ADD:
            grad_x += tl.load(ADDED + base, mask=real, other=0.0).to(tl.float32)
        tl.store(GRAD_X + base, grad_x.to(GRAD_X.dtype.element_ty), mask=real)
    tl.store(PARTS + program.to(tl.int64) * size + at, part, mask=real)


def norm_backward(grad_TE, x_TE, weight_E, inverse_T, added_TE=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of x, plus `added`, and of the weight)."""
    tokens, size = x_TE.shape
    grad_x = torch.empty_like(x_TE)
    each = max(1, triton.cdiv(tokens, 1024))
    programs = triton.cdiv(tokens, each)
    parts = x_TE.new_empty(programs, size, dtype=torch.float32)
    block = triton.next_power_of_2(size)
    _norm_backward[(programs,)](
        grad_TE.contiguous(), x_TE, weight_E, inverse_T, added_TE, grad_x, parts, tokens, size, each,
        added_TE is not None, block, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    return grad_x, parts.sum(0).to(weight_E.dtype)


@triton.jit
def _split_heads(
    QKV, COS, SIN, Q, K, V, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BACK: tl.constexpr
):
    """Between rows that hold all heads and three tensors: forward rotates, `BACK` turns gradients the other way."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, DP)
    half: tl.constexpr = D // 2
    real = at < half
    all_heads: tl.constexpr = H + 2 * KV
    row = QKV + token * (all_heads * D) + head * D
    if head < H:
        other = Q + (token * H + head) * D
    elif head < H + KV:
        other = K + (token * KV + head - H) * D
    else:
        other = V + (token * KV + head - H - KV) * D
    source, target = row, other
    if BACK:
        source, target = other, row
    x = tl.load(source + at, mask=real, other=0.0).to(tl.float32)
    y = tl.load(source + half + at, mask=real, other=0.0).to(tl.float32)
    if head < H + KV:
        cos_x = tl.load(COS + token * D + at, mask=real, other=0.0).to(tl.float32)
        sin_x = tl.load(SIN + token * D + at, mask=real, other=0.0).to(tl.float32)
        cos_y = tl.load(COS + token * D + half + at, mask=real, other=0.0).to(tl.float32)
        sin_y = tl.load(SIN + token * D + half + at, mask=real, other=0.0).to(tl.float32)
        if BACK:
            new_x, new_y = x * cos_x + y * sin_y, y * cos_y - x * sin_x
        else:
            new_x, new_y = x * cos_x - y * sin_x, y * cos_y + x * sin_y
        x, y = new_x, new_y
    tl.store(target + at, x.to(Q.dtype.element_ty), mask=real)
    tl.store(target + half + at, y.to(Q.dtype.element_ty), mask=real)


def _move_heads(qkv, cosine_TD, sine_TD, parts, back: bool) -> None:
    tokens, heads, size = parts[0].shape
    key_heads = parts[1].shape[1]
    _split_heads[(tokens, heads + 2 * key_heads)](
        qkv, cosine_TD, sine_TD, *parts, heads, key_heads, size, triton.next_power_of_2(max(16, size // 2)), back,
        num_warps=1,
    )  # fmt: skip


def split_heads(qkv_TC, heads: int, key_heads: int, cosine_TD, sine_TD) -> tuple[torch.Tensor, ...]:
    """Rotated queries and keys, and values, each contiguous, of rows that hold all three."""
    size = cosine_TD.shape[1]
    parts = tuple(qkv_TC.new_empty(len(qkv_TC), count, size) for count in (heads, key_heads, key_heads))
    _move_heads(qkv_TC, cosine_TD, sine_TD, parts, False)
    return parts


def join_heads(query_THD, key_TKD, value_TKD, cosine_TD, sine_TD) -> torch.Tensor:
    """The gradient of what `split_heads` took, from those of what it gave."""
    tokens, heads, size = query_THD.shape
    qkv = query_THD.new_empty(tokens, (heads + 2 * key_TKD.shape[1]) * size)
    parts = tuple(x.contiguous() for x in (query_THD, key_TKD, value_TKD))
    _move_heads(qkv, cosine_TD, sine_TD, parts, True)
    return qkv


@triton.jit
def _gate_backward(GRAD, GATE_UP, PRODUCT, OUT, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    grad = tl.load(GRAD + row * size + at, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(GATE_UP + row * 2 * size + at, mask=real, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * size + size + at, mask=real, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    kind = OUT.dtype.element_ty
    tl.store(PRODUCT + row * size + at, (silu.to(kind).to(tl.float32) * up).to(kind), mask=real)
    tl.store(OUT + row * 2 * size + at, (grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(kind), mask=real)
    tl.store(OUT + row * 2 * size + size + at, (grad * silu).to(kind), mask=real)


def gate_backward(grad_TI: torch.Tensor, gate_up_T2I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(silu(gate) * up once more, gradient of gate_up)."""
    product, grad = torch.empty_like(grad_TI), torch.empty_like(gate_up_T2I)
    tokens, size = grad_TI.shape
    _gate_backward[(tokens, triton.cdiv(size, 1024))](
        grad_TI.contiguous(), gate_up_T2I, product, grad, size, 1024, num_warps=4
    )
    return product, grad
