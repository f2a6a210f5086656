"""Products, attention and log-probs whose sums run in one order in decoding, prefill and training (`trainer.exact`).

Hopper's matrix units give a product the same bits for every tile and number of rows, in Triton as in torch, except
where torch splits the sum over the inputs: few rows with a long sum. So only those are computed here. Attention walks
over the keys of a query by position, in blocks that begin at multiples of KEYS, for one query as for a tile. Weights of
a block are summed by a product with ones: `tl.sum` would follow the layout of the tile.

Shapes: T tokens, B rows, C columns, E width, H query heads, K key heads, G = H / K, D head size, V vocabulary, L most
positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda import to_device
from posttrain.kernels.cuda.flash import seen_pieces
from posttrain.kernels.cuda.paged_attention import TILE
from posttrain.kernels.cuda.sampling import CHUNK, chunk_room, row_totals, sum_chunks

SPLIT_ROWS = 1023  # up to here torch may split a long sum: 18944 -> 3584 at 513 rows
KEYS = 64  # of one block
NONE = tl.constexpr(-1e30)  # the score of a masked key: finite, so that no NaN arises
LOG2_E, LN_2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)


# -- products ----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["rows"])
def _product(X, W, OUT, rows, columns, x_row, w_row, out_row, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    x = X + m.to(tl.int64)[:, None] * x_row + k[None, :]
    w = W + n.to(tl.int64)[None, :] * w_row + k[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, E, BK):
        inside = start + k < E
        left = tl.load(x + start, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(w + start, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        if IEEE:  # float32 inputs: no TF32, which keeps 10 bits
            total = tl.dot(left, right, total, input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
    at = m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(OUT + at, total.to(OUT.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def product(x_TE: torch.Tensor, weight_CE: torch.Tensor, out_TC: torch.Tensor) -> None:
    """out = x W', rounded once."""
    (rows, inner), columns = x_TE.shape, len(weight_CE)
    if rows > SPLIT_ROWS or inner < columns:
        torch.mm(x_TE, weight_CE.T, out=out_TC)
        return
    tall = 16 if rows <= 16 else 32 if rows <= 128 else 64
    grid = (triton.cdiv(rows, tall), triton.cdiv(columns, 32))
    strides = (x_TE.stride(0), weight_CE.stride(0), out_TC.stride(0))
    ieee = x_TE.dtype is torch.float32
    _product[grid](x_TE, weight_CE, out_TC, rows, columns, *strides, inner, tall, 32, 128, ieee,
                   num_warps=4, num_stages=4)  # fmt: skip


# -- attention ---------------------------------------------------------------------------------------------------------
@triton.jit
def _add_block(q, k, v, seen, scale, top, total, acc, ones, IEEE: tl.constexpr):
    # Online softmax over one more block of keys; `scale` includes log2 e.
    if IEEE:
        scores = tl.dot(q, k, input_precision="ieee") * scale
    else:
        scores = tl.dot(q, k) * scale
    scores = tl.where(seen, scores, NONE)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0).to(v.dtype)
    fade = tl.exp2(top - higher)
    if IEEE:
        acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
        total = tl.dot(weights, ones, total * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights, v, acc * fade[:, None])
        total = tl.dot(weights, ones, total * fade[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["tokens"])
def _tiles(
    Q, KEYS_AT, VALUES_AT, OUT, LOGSUM, TILES, BASES, POSITIONS, PLACES, scale, tokens,
    q_row, q_head, k_row, k_head, v_row, v_head,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SUMS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    # Late tiles of a row see the most keys: they come first, so that none of them is left alone at the end.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    first, past = tl.load(TILES + tile), tl.load(TILES + tile + 1)
    base = tl.load(BASES + tile)  # where the places of this row's keys are listed
    m, d, n = first + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, BN)
    real, one = m < past, d < D
    q = tl.load(Q + m.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :], mask=real[:, None] & one[None, :],
                other=0.0)  # fmt: skip
    position = tl.load(POSITIONS + m, mask=real, other=-1)
    end = tl.max(position, 0) + 1
    kv = head // (H // KV)
    top = tl.full([BM], NONE, tl.float32)
    total, acc = tl.zeros([BM, 16], tl.float32), tl.zeros([BM, DP], tl.float32)
    ones = tl.full([BN, 16], 1.0, VALUES_AT.dtype.element_ty)
    for begin in range(0, end, BN):
        at = begin + n
        there = at < end
        place = tl.load(PLACES + base + at, mask=there, other=0).to(tl.int64)
        if BLOCK > 0:  # places in the paged cache
            key = ((place // BLOCK) * KV + kv) * (BLOCK * D) + (place % BLOCK) * D
            value = key
        else:
            key, value = place * k_row + kv * k_head, place * v_row + kv * v_head
        k = tl.load(KEYS_AT + key[None, :] + d[:, None], mask=there[None, :] & one[:, None], other=0.0)
        v = tl.load(VALUES_AT + value[:, None] + d[None, :], mask=there[:, None] & one[None, :], other=0.0)
        seen = at[None, :] <= position[:, None]
        top, total, acc = _add_block(q, k, v, seen, scale, top, total, acc, ones, IEEE)
    whole = tl.max(total, 1)  # of sixteen equal columns
    whole = tl.where(whole == 0.0, 1.0, whole)  # the padding of a tile sees nothing
    out_at = m.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    tl.store(OUT + out_at, (acc / whole[:, None]).to(OUT.dtype.element_ty), mask=real[:, None] & one[None, :])
    if SUMS:
        tl.store(LOGSUM + head.to(tl.int64) * tokens + m, (top + tl.log2(whole)) * LN_2, mask=real)


def tile_attention(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    bases: torch.Tensor,
    positions_T: torch.Tensor,
    places: torch.Tensor,
    *,
    scale: float,
    sums: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(outputs (T, H, D), logarithms of the sums (H, T) if asked for).

    `tiles` are starts of runs of at most TILE tokens of one row, and the end; from `bases[tile]` on, `places` lists
    where the keys of that row are, by position: tokens of keys (T, K, D), or places of a paged cache (four dimensions).
    """
    tokens, heads, size = query_THD.shape
    paged = keys.ndim == 4
    key_heads, block = (keys.shape[1], keys.shape[2]) if paged else (keys.shape[1], 0)
    out = torch.empty(tokens, heads, size, dtype=query_THD.dtype, device=query_THD.device)
    logsum = torch.empty(heads, tokens, dtype=torch.float32, device=query_THD.device) if sums else None
    strides = [stride for x in (query_THD, keys, values) for stride in x.stride()[:2]]
    padded, ieee = max(16, triton.next_power_of_2(size)), query_THD.dtype is torch.float32
    _tiles[(len(tiles) - 1, heads)](
        query_THD, keys, values, out, logsum, tiles, bases, positions_T, places, scale * LOG2_E, tokens, *strides,
        heads, key_heads, size, padded, block, TILE, KEYS, sums, ieee, num_warps=4, num_stages=1 if ieee else 3,
    )  # fmt: skip
    return out, logsum


@dataclass
class Walks:
    """The keys of packed tokens by position, for `tile_attention`."""

    tiles: torch.Tensor
    bases: torch.Tensor
    positions_T: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, unit_starts: np.ndarray, end_T: np.ndarray, device: torch.device) -> Walks:
        """From a `Sight`: each piece of a unit sees some stretches of tokens before it, and then itself."""
        tiles, bases, positions, places, listed = [], [], [], [], 0
        pieces = [piece for unit in pairwise(unit_starts.tolist()) for piece in seen_pieces(end_T, *unit)]
        ends = [*(start for start, _ in pieces[1:]), int(unit_starts[-1])]
        for (start, spans), end in zip(pieces, ends, strict=True):
            path = np.concatenate([*(np.arange(*span) for span in spans), np.arange(start, end)])
            starts = range(start, end, TILE)
            tiles += starts
            bases += [listed] * len(starts)
            positions.append(np.arange(len(path) - (end - start), len(path)))
            places.append(path)
            listed += len(path)
        found = (
            np.array([*tiles, unit_starts[-1]], np.int32),
            np.array(bases, np.int64),
            np.concatenate(positions).astype(np.int32),
            np.concatenate(places).astype(np.int32),
        )
        return cls(*(to_device(torch.from_numpy(array), device) for array in found))


@triton.jit(do_not_specialize=["width"])
def _newest(
    Q, KEYS_AT, VALUES_AT, OUT, POSITIONS, PROMPTS, TABLE, scale, width,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    BN: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    real, one = g < G, d < D
    position, prompt = tl.load(POSITIONS + row), tl.load(PROMPTS + row)
    full = (prompt + BLOCK - 1) // BLOCK * BLOCK  # places from `prompt` to here are empty
    at_q = (row * (KV * G) + kv * G + g)[:, None] * D + d[None, :]
    q = tl.load(Q + at_q, mask=real[:, None] & one[None, :], other=0.0)
    top = tl.full([GP], NONE, tl.float32)
    total, acc = tl.zeros([GP, 16], tl.float32), tl.zeros([GP, DP], tl.float32)
    ones = tl.full([BN, 16], 1.0, VALUES_AT.dtype.element_ty)
    for begin in range(0, position + 1, BN):
        at = begin + n
        there = at <= position
        place = tl.where(at < prompt, at, at - prompt + full)
        block = tl.load(TABLE + row * width + place // BLOCK, mask=there, other=0).to(tl.int64)
        key = (block * KV + kv) * (BLOCK * D) + (place % BLOCK) * D
        k = tl.load(KEYS_AT + key[None, :] + d[:, None], mask=there[None, :] & one[:, None], other=0.0)
        v = tl.load(VALUES_AT + key[:, None] + d[None, :], mask=there[:, None] & one[None, :], other=0.0)
        seen = there[None, :] & (g >= 0)[:, None]
        top, total, acc = _add_block(q, k, v, seen, scale, top, total, acc, ones, IEEE)
    out = acc / tl.max(total, 1)[:, None]
    tl.store(OUT + at_q, out.to(OUT.dtype.element_ty), mask=real[:, None] & one[None, :])


def newest_attention(
    query_BHD: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    positions_B: torch.Tensor,
    prompts_B: torch.Tensor,
    table_BN: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """(B, H * D): each row's newest token over the cache, which holds it already. Blocks of a row are full but for the
    one in which its prompt ends, and the last."""
    rows, heads, size = query_BHD.shape
    key_heads, block = cache[0].shape[1:3]
    out, two = query_BHD.new_empty(rows, heads * size), triton.next_power_of_2
    ieee = query_BHD.dtype is torch.float32
    _newest[(rows, key_heads)](
        query_BHD, *cache, out, positions_B, prompts_B, table_BN, scale * LOG2_E, table_BN.shape[1],
        key_heads, heads // key_heads, max(16, two(heads // key_heads)), size, max(16, two(size)), block, KEYS, ieee,
        num_warps=4, num_stages=1 if ieee else 2,
    )  # fmt: skip
    return out


# -- log-probs ---------------------------------------------------------------------------------------------------------
@triton.jit
def _labelled(LOGITS, LABELS, TEMPERATURE, OUT, V):
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(LOGITS + row * V + tl.load(LABELS + row)).to(tl.float32)
    tl.store(OUT + row, x / tl.load(TEMPERATURE + row))


def label_log_probs(logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """(T,) log-probs as a decode step computes those of the tokens that it samples."""
    rows, size = logits_TV.shape
    heat = torch.full((rows,), temperature, dtype=torch.float32, device=logits_TV.device)
    value, top, log_total = (torch.empty_like(heat) for _ in range(3))
    if rows:
        logits_TV = logits_TV.contiguous()
        room = chunk_room(rows, size, CHUNK, logits_TV.device)
        sum_chunks(logits_TV, heat, room)
        row_totals(room, rows, room[0].shape[1], (top, log_total))
        _labelled[(rows,)](logits_TV, labels_T, heat, value, size, num_warps=1)
    # Two subtractions by torch: in a kernel the compiler could fuse one of them with the division.
    return (value - top - log_total).clamp_(max=0.0)
