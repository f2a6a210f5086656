"""The experts of gpt-oss: products with biases over weights that lie with their input first, (experts, input, output),
and a clamped gate, (clamp(up) + 1) * g * sigmoid(alpha g) with g = min(gate, limit). Gate and up are interleaved, so
one product makes both, and its columns are split in pairs.

Shapes as in `experts.py`; D inputs and O columns of a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early
from posttrain.kernels.cuda.experts import MOST_TOKENS, Tile, sort_pairs, weigh_parts

# (mean tokens of an expert up to which they are used, the tile of gate and up, the tile of down). A tile has room for
# more tokens than the mean, since an expert that needs a second tile reads its weights twice.
TILES: tuple[tuple[float, Tile, Tile], ...] = (
    (8, Tile(16, 128, 64, 4, 4, described=True), Tile(16, 128, 64, 4, 4, described=True)),
    (23, Tile(32, 128, 64, 4, 4, described=True), Tile(32, 128, 64, 4, 4, described=True)),
    (45, Tile(64, 128, 64, 4, 4, described=True), Tile(64, 128, 64, 4, 4, described=True)),
    (float("inf"), Tile(128, 128, 64, 8, 3, described=True), Tile(128, 256, 64, 8, 3, described=True)),
)
EXACT = Tile(16, 32, 32, 4, 2)  # float32: twice the bytes, and no matrix units of its precision


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
    GATED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_O: tl.constexpr, EXACT: tl.constexpr, EARLY: tl.constexpr,
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
            if EVEN_D:
                x = tl.load(at_x, mask=live[:, None], other=0.0)
            else:
                x = tl.load(at_x, mask=live[:, None] & (k < DEPTH)[None, :], other=0.0)
            if DESCRIBED:  # rows past DEPTH are those of the next expert, and are multiplied with zeros
                w = W.load([expert * DEPTH + k0, column])
            else:
                at_w = W + (expert.to(tl.int64) * DEPTH + k)[:, None] * COLUMNS + n[None, :]
                if EVEN_D and EVEN_O:
                    w = tl.load(at_w)
                else:
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


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """The tiles of both products for so many pairs."""
    if dtype is torch.float32:
        return EXACT, EXACT
    return next((one, other) for most, one, other in TILES if pairs <= most * experts)


def multiply(
    x: torch.Tensor,
    weight_XDO: torch.Tensor,
    bias_XO: torch.Tensor,
    order_P: torch.Tensor,
    ends_X: torch.Tensor,
    top_k: int,
    tile: Tile,
    gate: tuple[float, float] | None = None,
) -> torch.Tensor:
    """The product of every pair. With `gate`, its alpha and limit, x are tokens and pairs come out in the order of
    experts; without, x are these pairs, and those of a token come out side by side."""
    experts, depth, columns = weight_XDO.shape
    out = x.new_empty(len(order_P), columns if gate is None else columns // 2)
    early, weight = comes_early(x.device), weight_XDO
    if tile.described and columns * weight.element_size() % 16 == 0:  # the copy engine's rows begin at such multiples
        flat = weight.view(-1, columns)
        weight = TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tile.depth, tile.columns])
    _product[(triton.cdiv(columns, tile.columns), experts)](
        x, weight, bias_XO, out, order_P, ends_X, *(gate or (0.0, 0.0)), depth, columns, top_k, gate is not None,
        tile.rows, tile.columns, tile.depth, weight is not weight_XDO, depth % tile.depth == 0,
        columns % tile.columns == 0, x.dtype is torch.float32, early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
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
    first, second = tiles_for(len(order_P), len(gate_up_XEO), x_TE.dtype)
    pairs = (order_P, ends_X, top_k)
    gated_PI = multiply(x_TE.contiguous(), gate_up_XEO, gate_up_bias_XO, *pairs, first, (alpha, limit))
    parts_PE = multiply(gated_PI, down_XIE, down_bias_XE, *pairs, second)
    return weigh_parts(parts_PE, share_TK.contiguous())
