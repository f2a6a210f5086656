"""The experts of gpt-oss: products with biases over weights that lie with their input first, (experts, input, output),
and a clamped gate, (clamp(up) + 1) * g * sigmoid(alpha g) with g = min(gate, limit). Gate and up are interleaved, so
one product makes both, and its columns are split in pairs.

Shapes as in `experts.py`; O columns of a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early
from posttrain.kernels.cuda.experts import MOST_TOKENS, sort_pairs, weigh_parts


@triton.jit
def _clamped(both, alpha, limit, kind: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    # Rounded where torch rounds: after the product with its bias, and after each operation of the gate.
    gate, up = tl.split(tl.reshape(both.to(kind), [BM, BN // 2, 2]))
    gate = tl.minimum(gate.to(tl.float32), limit)
    up = tl.minimum(tl.maximum(up.to(tl.float32), -limit), limit)
    slope = (1.0 / (1.0 + tl.exp(-(gate * alpha).to(kind).to(tl.float32)))).to(kind).to(tl.float32)
    glu = (gate * slope).to(kind).to(tl.float32)
    return ((up + 1.0).to(kind).to(tl.float32) * glu).to(kind)


@triton.jit
def _product(
    X, W, BIAS, OUT, ORDER, ENDS, alpha, limit, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    expert, column = tl.program_id(1), tl.program_id(0) * BN
    end = tl.load(ENDS + expert)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    n, depth = column + tl.arange(0, BN), tl.arange(0, BK)
    for start in range(begin, end, BM):
        pair = start + tl.arange(0, BM)
        live = pair < end
        place = tl.load(ORDER + pair, mask=live, other=0)
        # Gate and up read tokens and write pairs in the order of experts; down reads these, and writes them back to
        # the places of their tokens.
        row = place // K if GATED else pair
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, DEPTH, BK):
            k = k0 + depth
            at_x = X + row.to(tl.int64)[:, None] * DEPTH + k[None, :]
            at_w = W + (expert.to(tl.int64) * DEPTH + k)[:, None] * COLUMNS + n[None, :]
            if EVEN:
                x = tl.load(at_x, mask=live[:, None], other=0.0)
                w = tl.load(at_w)
            else:
                x = tl.load(at_x, mask=live[:, None] & (k < DEPTH)[None, :], other=0.0)
                w = tl.load(at_w, mask=(k < DEPTH)[:, None] & (n < COLUMNS)[None, :], other=0.0)
            if EXACT:
                acc = tl.dot(x, w, acc, input_precision="ieee")
            else:
                acc = tl.dot(x, w, acc)
        acc += tl.load(BIAS + expert * COLUMNS + n, mask=n < COLUMNS, other=0.0).to(tl.float32)[None, :]
        if GATED:
            y = _clamped(acc, alpha, limit, OUT.dtype.element_ty, BM, BN)
            o = column // 2 + tl.arange(0, BN // 2)
            to = OUT + pair.to(tl.int64)[:, None] * (COLUMNS // 2) + o[None, :]
            tl.store(to, y, mask=live[:, None] & (o < COLUMNS // 2)[None, :])
        else:
            to = OUT + place.to(tl.int64)[:, None] * COLUMNS + n[None, :]
            tl.store(to, acc.to(OUT.dtype.element_ty), mask=live[:, None] & (n < COLUMNS)[None, :])


def _multiply(
    x: torch.Tensor, weight_XDO: torch.Tensor, bias_XO: torch.Tensor, order_P, ends_X, top_k: int, gate: tuple | None
) -> torch.Tensor:
    experts, depth, columns = weight_XDO.shape
    pairs = len(order_P)
    out = x.new_empty(pairs, columns if gate is None else columns // 2)
    rows = min(64, max(16, triton.next_power_of_2(triton.cdiv(pairs, experts))))
    exact, early = x.dtype is torch.float32, comes_early(x.device)
    wide, deep, warps, stages = (32, 32, 4, 2) if exact else (128, 64, 4 if rows < 64 else 8, 3)
    even = columns % wide == 0 and depth % deep == 0
    _product[(triton.cdiv(columns, wide), experts)](
        x, weight_XDO, bias_XO, out, order_P, ends_X, *(gate or (0.0, 0.0)), depth, columns, top_k, gate is not None,
        rows, wide, deep, even, exact, early, num_warps=warps, num_stages=stages, launch_pdl=early,
    )  # fmt: skip
    return out


def clamped_expert_sum(
    x_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    share_TK: torch.Tensor,
    gate_up_XEO: torch.Tensor,
    down_XIE: torch.Tensor,
    gate_up_bias_XO: torch.Tensor,
    down_bias_XE: torch.Tensor,
    *,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """The weighted sum of a token's experts, (T, E)."""
    if len(x_TE) > MOST_TOKENS:
        given, how = (gate_up_XEO, down_XIE, gate_up_bias_XO, down_bias_XE), {"alpha": alpha, "limit": limit}
        parts = zip(*(part.split(MOST_TOKENS) for part in (x_TE, chosen_TK, share_TK)), strict=True)
        return torch.cat([clamped_expert_sum(*part, *given, **how) for part in parts])
    if not len(x_TE):
        return torch.empty_like(x_TE)
    top_k = chosen_TK.shape[1]
    order_P, ends_X = sort_pairs(chosen_TK.int().contiguous(), len(gate_up_XEO))
    gated_PI = _multiply(x_TE.contiguous(), gate_up_XEO, gate_up_bias_XO, order_P, ends_X, top_k, (alpha, limit))
    parts_PE = _multiply(gated_PI, down_XIE, down_bias_XE, order_P, ends_X, top_k, None)
    return weigh_parts(parts_PE, share_TK.contiguous())
