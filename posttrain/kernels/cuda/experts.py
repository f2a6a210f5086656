"""The feed-forward part of a mixture of experts: the choice of experts, tokens in the order of their experts, and two
products over the stacked weights of all experts. Nothing waits for the host, so that a decode step can be captured.

A program of a product takes one expert and some of its columns, and walks over the expert's tokens. So the weights of
an expert with few tokens are read once, and those of an expert without tokens not at all: reading them is most of a
mixture's decode step (12.1 of 21.2 ms at the shape of Qwen3-30B-A3B with 512 sequences on an H200).

Shapes: T tokens, E width of the model, X experts, K experts of a token, P = T K pairs of a token and an expert, I width
of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early
from posttrain.kernels.cuda.fp8 import quantize_rows
from posttrain.kernels.cuda.fused_products import _gate
from posttrain.kernels.quantized import FP8, Quantized, round_rows

MOST_TOKENS = 8192  # that are computed at once: tensors between the products are K times as large
_SORTED_AT_ONCE = 1024  # pairs


@dataclass(frozen=True)
class Tile:
    """How a product is cut: `rows` (tokens of an expert) by `columns` of its weight, `depth` numbers of a sum at once.

    `turned` multiplies weights with tokens instead of tokens with weights: Hopper's matrix units take 64 rows on the
    left and as few as 8 on the right. `described` reads weights by the device's copy engine.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    turned: bool = False
    described: bool = False

    def __str__(self) -> str:
        kind = f"{' turned' if self.turned else ''}{' described' if self.described else ''}"
        return f"{self.rows}x{self.columns}x{self.depth} w{self.warps} s{self.stages}{kind}"


# (mean tokens of an expert up to which they are used, the tile of gate and up, the tile of down): the fastest of 36 on
# an H200 for 128 experts of 2048 x 768, at 4, 16, 32, 64 and 512 tokens an expert (`scripts/measure_mixture.py
# --sweep`).
TILES: tuple[tuple[float, Tile, Tile], ...] = (
    (8, Tile(16, 64, 128, 4, 3, True, True), Tile(16, 64, 128, 4, 3, True, True)),
    (23, Tile(32, 64, 64, 4, 3, True, True), Tile(32, 64, 128, 4, 3, True, True)),
    (45, Tile(64, 64, 64, 4, 3, True, True), Tile(64, 128, 64, 4, 4, False, True)),
    (181, Tile(128, 128, 64, 8, 4, True, True), Tile(128, 128, 64, 8, 3, False, True)),
    (float("inf"), Tile(128, 128, 64, 8, 4, True, True), Tile(128, 128, 64, 8, 4, True, True)),
)

# The same for fp8, the fastest of 58 (`scripts/measure_mixture.py --sweep --fp8`).
FP8_TILES: tuple[tuple[float, Tile, Tile], ...] = (
    (8, Tile(16, 64, 256, 4, 3, True, True), Tile(16, 64, 128, 4, 3, True, True)),
    (23, Tile(32, 64, 128, 4, 3, True, True), Tile(32, 64, 128, 4, 3, True, True)),
    (45, Tile(64, 64, 128, 4, 3, True, True), Tile(64, 128, 128, 4, 4, False, True)),
    (181, Tile(128, 64, 128, 4, 3, True, True), Tile(64, 128, 128, 4, 4, False, True)),
    (float("inf"), Tile(128, 128, 128, 8, 4, True, True), Tile(128, 128, 64, 4, 4, True, True)),
)


def tiles_for(pairs: int, experts: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """The tiles for so many pairs. They follow from sizes alone, since a captured step must fit any routing."""
    table = FP8_TILES if dtype is FP8 else TILES
    gate_up, down = next((one, other) for most, one, other in table if pairs <= most * experts)
    if dtype is torch.float32:  # twice the bytes, and no matrix units of its precision
        return Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2)
    return gate_up, down


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    LOGITS, CHOSEN, SHARE, tokens,
    X: tl.constexpr, XP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, NORMALISED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    token = tl.program_id(0) * N + tl.arange(0, N)
    x, k = tl.arange(0, XP)[None, :], tl.arange(0, KP)[None, :]
    real = (token < tokens)[:, None]
    logits = tl.load(LOGITS + token[:, None] * X + x, mask=real & (x < X), other=float("-inf")).to(tl.float32)
    logits = tl.where(real, logits, 0.0)
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    p = tl.where(x < X, p / tl.sum(p, 1)[:, None], -1.0)
    share, chosen = tl.zeros([N, KP], tl.float32), tl.zeros([N, KP], tl.int32)
    for number in tl.static_range(K):
        # Of equal ones the first, like torch's topk on this device. NaN logits still select a valid expert.
        best = tl.minimum(tl.argmax(p, 1), X - 1)
        share = tl.where(k == number, tl.max(p, 1)[:, None], share)
        chosen = tl.where(k == number, best[:, None], chosen)
        p = tl.where(x == best[:, None], -1.0, p)
    if NORMALISED:
        share = share / tl.sum(share, 1)[:, None]
    into = token[:, None] * K + k
    tl.store(CHOSEN + into, chosen, mask=real & (k < K))
    tl.store(SHARE + into, share.to(SHARE.dtype.element_ty), mask=real & (k < K))


def choose_experts(
    logits_TX: torch.Tensor, top_k: int, *, normalised: bool, share_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts of each token, their shares), (T, K) each: the largest of a float32 softmax, in descending order."""
    tokens, experts = logits_TX.shape
    chosen = logits_TX.new_empty(tokens, top_k, dtype=torch.int32)
    share = logits_TX.new_empty(tokens, top_k, dtype=share_dtype)
    early, two = comes_early(logits_TX.device), triton.next_power_of_2
    _choose[(triton.cdiv(tokens, 4),)](
        logits_TX, chosen, share, tokens, experts, two(experts), top_k, two(top_k), 4, normalised, early,
        num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return chosen, share


@triton.jit(do_not_specialize=["pairs"])
def _sort(CHOSEN, ORDER, ENDS, pairs, N: tl.constexpr, EARLY: tl.constexpr):
    # A counting sort with one program per expert: it counts the pairs of the experts before it, and so knows where its
    # own go. Without atomics, so that the order is always the same.
    if EARLY:
        _wait()
    expert, at = tl.program_id(0), tl.arange(0, N)
    before, own = tl.zeros([N], tl.int32), tl.zeros([N], tl.int32)
    for start in range(0, pairs, N):
        chosen = tl.load(CHOSEN + start + at, mask=start + at < pairs, other=2147483647)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    place = tl.sum(before, 0)
    end = place + tl.sum(own, 0)
    tl.store(ENDS + expert, end)
    if place < end:
        for start in range(0, pairs, N):
            chosen = tl.load(CHOSEN + start + at, mask=start + at < pairs, other=2147483647)
            here = chosen == expert
            count = tl.cumsum(here.to(tl.int32), 0)
            tl.store(ORDER + place + count - 1, start + at, mask=here)
            place += tl.sum(here.to(tl.int32), 0)


def sort_pairs(chosen_TK: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of the pairs in the order of their experts, where the pairs of each expert end); always the same ones
    for the same choice."""
    order, ends = torch.empty_like(chosen_TK.view(-1)), chosen_TK.new_empty(experts)
    early = comes_early(chosen_TK.device)
    _sort[(experts,)](chosen_TK, order, ends, len(order), _SORTED_AT_ONCE, early, num_warps=4, launch_pdl=early)
    return order, ends


@triton.jit
def _piece(W, expert, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
           DESCRIBED: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    # (BN, BK) of an expert's weight of ROWS x COLUMNS.
    if DESCRIBED:
        piece = W.load([expert * ROWS + row, column])
    else:
        n, k = row + tl.arange(0, BN), column + tl.arange(0, BK)
        at = W + (expert.to(tl.int64) * ROWS + n)[:, None] * COLUMNS + k[None, :]
        if EVEN:
            piece = tl.load(at)
        else:
            piece = tl.load(at, mask=(n < ROWS)[:, None] & (k < COLUMNS)[None, :], other=0.0)
    return piece


# "ieee" matters for float32 only: without it the inputs would be rounded to TF32.
@triton.jit
def _product(x, weight, acc, TURNED: tl.constexpr):
    if TURNED:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit
def _tokens(X, row, live, column, COLUMNS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    # (rows, BK) of these rows; zeros for rows that are not live.
    k = column + tl.arange(0, BK)
    at = X + row.to(tl.int64)[:, None] * COLUMNS + k[None, :]
    if EVEN:
        x = tl.load(at, mask=live[:, None], other=0.0)
    else:
        x = tl.load(at, mask=live[:, None] & (k < COLUMNS)[None, :], other=0.0)
    return x


@triton.jit
def _store(OUT, y, row, live, column, COLUMNS: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    n = column + tl.arange(0, BN)
    row = row.to(tl.int64) * COLUMNS
    if TURNED:
        tl.store(OUT + row[None, :] + n[:, None], y, mask=live[None, :] & (n < COLUMNS)[:, None])
    else:
        tl.store(OUT + row[:, None] + n[None, :], y, mask=live[:, None] & (n < COLUMNS)[None, :])


@triton.jit
def _scaled(y, XS, WS, row, live, expert, column, ROWS: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr):
    # Scales of rows on both sides are applied to the float32 sum, once.
    x_scale = tl.load(XS + row, mask=live, other=0.0)
    n = column + tl.arange(0, BN)
    w_scale = tl.load(WS + expert.to(tl.int64) * ROWS + n, mask=n < ROWS, other=0.0)
    if TURNED:
        y = y * w_scale[:, None] * x_scale[None, :]
    else:
        y = y * x_scale[:, None] * w_scale[None, :]
    return y


@triton.jit
def _gate_up(
    X, W, XS, WS, OUT, ORDER, ENDS, WIDTH: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    expert, column = tl.program_id(1), tl.program_id(0) * BN
    end = tl.load(ENDS + expert)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    for start in range(begin, end, BM):
        pair = start + tl.arange(0, BM)
        live = pair < end
        # Tokens are gathered here, so that no copy of them in the order of experts is made.
        token = tl.load(ORDER + pair, mask=live, other=0) // K
        gate = tl.zeros([BN, BM] if TURNED else [BM, BN], tl.float32)
        up = tl.zeros([BN, BM] if TURNED else [BM, BN], tl.float32)
        for k in range(0, WIDTH, BK):
            x = _tokens(X, token, live, k, WIDTH, BK, EVEN)
            gate = _product(x, _piece(W, expert, column, k, 2 * SIZE, WIDTH, BN, BK, DESCRIBED, EVEN), gate, TURNED)
            up = _product(x, _piece(W, expert, SIZE + column, k, 2 * SIZE, WIDTH, BN, BK, DESCRIBED, EVEN), up, TURNED)
        if XS is not None:
            gate = _scaled(gate, XS, WS, token, live, expert, column, 2 * SIZE, BN, TURNED)
            up = _scaled(up, XS, WS, token, live, expert, SIZE + column, 2 * SIZE, BN, TURNED)
        _store(OUT, _gate(gate, up, OUT.dtype.element_ty), pair, live, column, SIZE, BN, TURNED)


@triton.jit
def _down(
    X, W, XS, WS, OUT, ORDER, ENDS, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    expert, column = tl.program_id(1), tl.program_id(0) * BN
    end = tl.load(ENDS + expert)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    for start in range(begin, end, BM):
        pair = start + tl.arange(0, BM)
        live = pair < end
        y = tl.zeros([BN, BM] if TURNED else [BM, BN], tl.float32)
        for k in range(0, SIZE, BK):
            x = _tokens(X, pair, live, k, SIZE, BK, EVEN)
            y = _product(x, _piece(W, expert, column, k, WIDTH, SIZE, BN, BK, DESCRIBED, EVEN), y, TURNED)
        if XS is not None:
            y = _scaled(y, XS, WS, pair, live, expert, column, WIDTH, BN, TURNED)
        # Scattered back: the K results of a token then lie side by side for `_weigh`.
        place = tl.load(ORDER + pair, mask=live, other=0)
        _store(OUT, y.to(OUT.dtype.element_ty), place, live, column, WIDTH, BN, TURNED)


Rows = torch.Tensor | Quantized


def gate_up_pairs(
    x_TE: Rows,
    weight_X2IE: Rows,
    order_P: torch.Tensor,
    ends_X: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """silu(gate) * up of every pair, (P, I), in the order of the experts. Input and weight are both fp8, or neither."""
    x, weights, scales = _parts(x_TE, weight_X2IE)
    experts, both, width = weights.shape
    size = both // 2
    out = x.new_empty(len(order_P), size, dtype=dtype or x.dtype)
    weight, even = _describe(weights, tile), size % tile.columns == 0 and width % tile.depth == 0
    early = comes_early(x.device)
    _gate_up[(triton.cdiv(size, tile.columns), experts)](
        x, weight, *scales, out, order_P, ends_X, width, size, len(order_P) // len(x), tile.rows, tile.columns,
        tile.depth, tile.turned, weight is not weights, even, early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip
    return out


def down_pairs(
    x_PI: Rows,
    weight_XEI: Rows,
    order_P: torch.Tensor,
    ends_X: torch.Tensor,
    tile: Tile,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The product of every pair, (P, E), those of a token side by side."""
    x, weights, scales = _parts(x_PI, weight_XEI)
    experts, width, size = weights.shape
    out = x.new_empty(len(order_P), width, dtype=dtype or x.dtype)
    weight, even = _describe(weights, tile), width % tile.columns == 0 and size % tile.depth == 0
    early = comes_early(x.device)
    _down[(triton.cdiv(width, tile.columns), experts)](
        x, weight, *scales, out, order_P, ends_X, width, size, tile.rows, tile.columns, tile.depth,
        tile.turned, weight is not weights, even, early,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
    )  # fmt: skip
    return out


def _parts(x: Rows, weight: Rows) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, Any]]:
    if isinstance(x, Quantized):
        assert isinstance(weight, Quantized)
        return x.values, weight.values, (x.scales, weight.scales)
    assert not isinstance(weight, Quantized)
    return x, weight, (None, None)


def _describe(weight: torch.Tensor, tile: Tile) -> torch.Tensor | TensorDescriptor:
    # The weights of all experts as one matrix for the copy engine, whose rows must begin at multiples of 16 bytes. A
    # tile may reach into the next expert's rows; results of those are not stored.
    if not tile.described or weight.shape[2] * weight.element_size() % 16:
        return weight
    flat = weight.view(-1, weight.shape[2])
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [tile.columns, tile.depth])


@triton.jit
def _weigh(PARTS, SHARE, OUT, size, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        _wait()
    token, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        share = tl.load(SHARE + token * K + k).to(tl.float32)
        part = tl.load(PARTS + (token * K + k) * size + at, mask=real, other=0.0).to(tl.float32)
        total += (part * share).to(SHARE.dtype.element_ty).to(tl.float32)  # rounded where torch rounds
    tl.store(OUT + token * size + at, total.to(OUT.dtype.element_ty), mask=real)


def weigh_parts(parts_PE: torch.Tensor, share_TK: torch.Tensor) -> torch.Tensor:
    """The sum of a token's parts by their shares, (T, E)."""
    tokens, top_k = share_TK.shape
    size = parts_PE.shape[1]
    out, early = parts_PE.new_empty(tokens, size), comes_early(parts_PE.device)
    _weigh[(tokens, triton.cdiv(size, 1024))](
        parts_PE, share_TK, out, size, top_k, 1024, early, num_warps=4, launch_pdl=early
    )
    return out


def mixture(
    x_TE: torch.Tensor,
    router_XE: torch.Tensor,
    gate_up_X2IE: Rows,
    down_XEI: Rows,
    *,
    top_k: int,
    normalised: bool,
    share_dtype: torch.dtype,
    fp8: bool = False,
    routes_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of a token's experts, (T, E); `kernels/decode.py` describes the arguments."""
    if len(x_TE) > MOST_TOKENS:
        how = {"top_k": top_k, "normalised": normalised, "share_dtype": share_dtype, "fp8": fp8}
        parts = x_TE.split(MOST_TOKENS)
        routes = [None] * len(parts) if routes_TK is None else routes_TK.split(MOST_TOKENS)
        given = (router_XE, gate_up_X2IE, down_XEI)
        return torch.cat([mixture(x, *given, **how, routes_TK=own) for x, own in zip(parts, routes, strict=True)])
    if not len(x_TE):
        return torch.empty_like(x_TE)
    logits_TX = F.linear(x_TE, router_XE)
    chosen_TK, share_TK = choose_experts(logits_TX, top_k, normalised=normalised, share_dtype=share_dtype)
    if routes_TK is not None:
        routes_TK.copy_(chosen_TK)
    return _sum(x_TE, chosen_TK, share_TK, gate_up_X2IE, down_XEI, fp8=fp8)


def expert_sum(
    x_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    share_TK: torch.Tensor,
    gate_up_X2IE: torch.Tensor,
    down_XEI: torch.Tensor,
) -> torch.Tensor:
    """The same for experts that were chosen elsewhere."""
    if not len(x_TE):
        return torch.empty_like(x_TE)
    chosen_TK, share_TK = chosen_TK.int().contiguous(), share_TK.contiguous()
    parts = zip(*(part.split(MOST_TOKENS) for part in (x_TE.contiguous(), chosen_TK, share_TK)), strict=True)
    found = [_sum(*part, gate_up_X2IE, down_XEI, fp8=False) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _sum(
    x_TE: torch.Tensor,
    chosen_TK: torch.Tensor,
    share_TK: torch.Tensor,
    gate_up_X2IE: Rows,
    down_XEI: Rows,
    *,
    fp8: bool,
) -> torch.Tensor:
    experts = _parts(gate_up_X2IE, down_XEI)[0].shape[0]
    order_P, ends_X = sort_pairs(chosen_TK, experts)
    rounded: Callable[[torch.Tensor], Rows] = _as_it_is
    if fp8:  # weights that the device cannot multiply in fp8 are rounded, but stay in their own type
        rounded = quantize_rows if isinstance(gate_up_X2IE, Quantized) else round_rows
    kind = FP8 if isinstance(gate_up_X2IE, Quantized) else x_TE.dtype
    first, second = tiles_for(len(order_P), experts, kind)
    gated_PI = gate_up_pairs(rounded(x_TE), gate_up_X2IE, order_P, ends_X, first, x_TE.dtype)
    parts_PE = down_pairs(rounded(gated_PI), down_XEI, order_P, ends_X, second, x_TE.dtype)
    return weigh_parts(parts_PE, share_TK)


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x
