"""The parts of a decoder layer's training pass between its matrix products; `posttrain.kernels.train` chooses.

Sums and exponentials are in float32, results in the type of the input. `posttrain.models.fused_layer` puts them
together.

Shapes: T packed tokens, H heads of queries, K heads of keys, D head size, E width of the model, I of the gated layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.elementwise import norm_warps


@triton.jit
def _norm_forward(X, WEIGHT, OUT, INVERSE, COPY, size, epsilon, COPIED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < size
    given = tl.load(X + row * size + at, mask=real, other=0.0)
    x = given.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + row * size + at, (x * inverse * weight).to(OUT.dtype.element_ty), mask=real)
    tl.store(INVERSE + row, inverse)
    if COPIED:
        # The residual is copied here because the row is in registers. torch's addmm would copy what it adds to first:
        # 1.3 % of an update at 0.5B.
        tl.store(COPY + row * size + at, given, mask=real)


def norm_forward(
    x_TE: torch.Tensor, weight_E: torch.Tensor, epsilon: float, copy_TE: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms(x) * weight, 1 / rms(x)); x itself is copied to `copy`, if given."""
    out, inverse = torch.empty_like(x_TE), x_TE.new_empty(len(x_TE), dtype=torch.float32)
    block = triton.next_power_of_2(x_TE.shape[1])
    _norm_forward[(len(x_TE),)](
        x_TE, weight_E, out, inverse, copy_TE, x_TE.shape[1], epsilon, copy_TE is not None, block,
        num_warps=norm_warps(block),  # as in a decode step: the order of the sum depends on it
    )  # fmt: skip
    return out, inverse


@triton.jit(do_not_specialize=["tokens", "each"])
def _norm_backward(
    GRAD, X, WEIGHT, INVERSE, ADDED, GRAD_X, PARTS, tokens, size, each,
    ADD: tl.constexpr, TRAINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    real = at < size
    weight = tl.load(WEIGHT + at, mask=real, other=0.0).to(tl.float32)
    part = tl.zeros([BLOCK], tl.float32)
    zero = tl.full([], 0, tl.int64)  # offsets of large tensors need 64 bits
    # A program takes consecutive tokens, so that the weight's gradient is one partial sum per program, in a fixed order
    # and without atomics.
    for token in range(program * each, tl.minimum((program + 1) * each, tokens)):
        base = (zero + token) * size + at
        x = tl.load(X + base, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + base, mask=real, other=0.0).to(tl.float32)
        inverse = tl.load(INVERSE + token)
        normed = x * inverse
        if TRAINED:  # frozen with LoRA
            part += grad * normed
        weighted = grad * weight
        grad_x = (weighted - normed * (tl.sum(weighted * normed, 0) / size)) * inverse
        if ADD:
            grad_x += tl.load(ADDED + base, mask=real, other=0.0).to(tl.float32)
        tl.store(GRAD_X + base, grad_x.to(GRAD_X.dtype.element_ty), mask=real)
    if TRAINED:
        tl.store(PARTS + program.to(tl.int64) * size + at, part, mask=real)


def norm_backward(
    grad_TE, x_TE, weight_E, inverse_T, added_TE=None, *, trained: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(gradient of x, plus `added`, and of the weight, if it is `trained`)."""
    tokens, size = x_TE.shape
    grad_x = torch.empty_like(x_TE)
    each = max(1, triton.cdiv(tokens, 1024))
    programs = triton.cdiv(tokens, each)
    parts = x_TE.new_empty(programs, size, dtype=torch.float32) if trained else None
    block = triton.next_power_of_2(size)
    _norm_backward[(programs,)](
        grad_TE.contiguous(), x_TE, weight_E, inverse_T, added_TE, grad_x, parts, tokens, size, each,
        added_TE is not None, trained, block, num_warps=1 if block <= 256 else 4,
    )  # fmt: skip
    return grad_x, None if parts is None else column_sums(parts, weight_E.dtype)


@triton.jit
def _turn(SOURCE, TARGET, x_at, y_at, to_x, to_y, real, cos_x, sin_x, cos_y, sin_y, BACK: tl.constexpr,
          ROUNDED: tl.constexpr):  # fmt: skip
    # Rotates heads; `BACK` rotates gradients the other way. Both halves of a head are loaded first, since they may be
    # overwritten in place. `ROUNDED` rounds after each operation, as decode steps and torch do.
    kind = TARGET.dtype.element_ty
    x = tl.load(SOURCE + x_at, mask=real, other=0.0).to(tl.float32)
    y = tl.load(SOURCE + y_at, mask=real, other=0.0).to(tl.float32)
    if BACK:
        new_x, new_y = x * cos_x + y * sin_y, y * cos_y - x * sin_x
    elif ROUNDED:
        new_x = (x * cos_x).to(kind).to(tl.float32) + (-y * sin_x).to(kind).to(tl.float32)
        new_y = (y * cos_y).to(kind).to(tl.float32) + (x * sin_y).to(kind).to(tl.float32)
    else:
        new_x, new_y = x * cos_x - y * sin_x, y * cos_y + x * sin_y
    tl.store(TARGET + to_x, new_x.to(TARGET.dtype.element_ty), mask=real)
    tl.store(TARGET + to_y, new_y.to(TARGET.dtype.element_ty), mask=real)


@triton.jit
def _move_heads(
    QKV, COS, SIN, Q, K, V,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, KP: tl.constexpr, HALF: tl.constexpr,
    BACK: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    # Rotates the queries and keys of a token in place, so that attention reads views of the product and nothing is
    # copied. `BACK` joins the three gradients into one row.
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    cos_x = tl.load(COS + token * D + d, mask=d < half, other=0.0).to(tl.float32)
    sin_x = tl.load(SIN + token * D + d, mask=d < half, other=0.0).to(tl.float32)
    cos_y = tl.load(COS + token * D + half + d, mask=d < half, other=0.0).to(tl.float32)
    sin_y = tl.load(SIN + token * D + half + d, mask=d < half, other=0.0).to(tl.float32)
    row = token * ((H + 2 * KV) * D)
    h, k = tl.arange(0, HP)[:, None], tl.arange(0, KP)[:, None]
    q_at, k_at = row + h * D + d, row + (H + k) * D + d
    q_real, k_real = (h < H) & (d < half), (k < KV) & (d < half)
    if BACK:
        q_from, k_from = token * (H * D) + h * D + d, token * (KV * D) + k * D + d
        _turn(Q, QKV, q_from, q_from + half, q_at, q_at + half, q_real, cos_x, sin_x, cos_y, sin_y, BACK, ROUNDED)
        _turn(K, QKV, k_from, k_from + half, k_at, k_at + half, k_real, cos_x, sin_x, cos_y, sin_y, BACK, ROUNDED)
        v_at = row + (H + KV + k) * D + d
        tl.store(QKV + v_at, tl.load(V + k_from, mask=k_real, other=0.0), mask=k_real)
        tl.store(QKV + v_at + half, tl.load(V + k_from + half, mask=k_real, other=0.0), mask=k_real)
    else:
        _turn(QKV, QKV, q_at, q_at + half, q_at, q_at + half, q_real, cos_x, sin_x, cos_y, sin_y, BACK, ROUNDED)
        _turn(QKV, QKV, k_at, k_at + half, k_at, k_at + half, k_real, cos_x, sin_x, cos_y, sin_y, BACK, ROUNDED)


def _sizes(heads: int, key_heads: int, size: int) -> tuple[int, ...]:
    two = triton.next_power_of_2
    return heads, key_heads, size, two(heads), two(key_heads), two(size // 2)


def split_heads(
    qkv_TC, heads: int, key_heads: int, cosine_TD, sine_TD, *, rounded: bool = False
) -> tuple[torch.Tensor, ...]:
    """Views of rotated queries and keys, and of values; the rows, which hold all three, are rotated in place."""
    size = cosine_TD.shape[1]
    _move_heads[(len(cosine_TD),)](
        qkv_TC, cosine_TD, sine_TD, None, None, None, *_sizes(heads, key_heads, size), False, rounded, num_warps=4
    )
    return qkv_TC.unflatten(1, (-1, size)).split([heads, key_heads, key_heads], 1)


def join_heads(query_THD, key_TKD, value_TKD, cosine_TD, sine_TD) -> torch.Tensor:
    """The gradient of the input of `split_heads`, from those of its outputs."""
    tokens, heads, size = query_THD.shape
    key_heads = key_TKD.shape[1]
    qkv = query_THD.new_empty(tokens, (heads + 2 * key_heads) * size)
    parts = tuple(x.contiguous() for x in (query_THD, key_TKD, value_TKD))
    _move_heads[(tokens,)](qkv, cosine_TD, sine_TD, *parts, *_sizes(heads, key_heads, size), True, False, num_warps=4)
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
    # The product is computed again instead of being kept from the forward pass; it is rounded as it was there.
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


# Sums over rows (gradients of biases and of norms' weights), in float32 and always in the same order. torch's own
# reduction gives few programs to few columns: it took five times as long as reading the rows, 2 % of an update.
MOST_PARTS = 256  # partial sums, each by one program


@triton.jit(do_not_specialize=["rows", "each"])
def _sum_rows(X, OUT, rows, columns, each, BN: tl.constexpr, BC: tl.constexpr):
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
    """(C,) in `dtype`. Many rows are summed in two steps, so that all processors take part."""
    rows, columns = x_NC.shape
    if rows > 4 * MOST_PARTS:
        each = triton.cdiv(rows, MOST_PARTS)
        parts_PC = x_NC.new_empty(triton.cdiv(rows, each), columns, dtype=torch.float32)
        _sum_rows[(len(parts_PC), triton.cdiv(columns, 128))](
            x_NC.contiguous(), parts_PC, rows, columns, each, 16, 128, num_warps=4
        )
        x_NC, rows = parts_PC, len(parts_PC)
    out = x_NC.new_empty(columns, dtype=dtype)
    _sum_rows[(1, triton.cdiv(columns, 32))](x_NC.contiguous(), out, rows, columns, max(1, rows), 256, 32, num_warps=8)
    return out
