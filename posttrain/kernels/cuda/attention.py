"""Prefill attention: tiles of queries over the paged cache, which already holds their keys.

The cache of a layer is two pools of blocks, (blocks, key heads, BLOCK, D). A row reads its blocks in the order of its
table. Only live keys are read. `decode_attention.py` is for one query per row.

Shapes: T tokens, H query heads, K key heads, D head size, N blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS_AT_ONCE = 32  # places of the cache in one iteration


@triton.jit
def _block_scores(q, KEYS, at, live, scale, D: tl.constexpr, DP: tl.constexpr, EXACT: tl.constexpr):
    d = tl.arange(0, DP)
    k = tl.load(KEYS + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    if EXACT:
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        return tl.dot(q, tl.trans(k)) * scale


@triton.jit(do_not_specialize=["width", "far"])
def _prefill(
    Q, KEYS, VALUES, OUT, TILES, ROWS, POSITIONS, TABLE, STARTS, scale, width, window, far,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first, past = tl.load(TILES + tile), tl.load(TILES + tile + 1)
    row = tl.load(ROWS + first)  # a tile has tokens of one row only
    token = first + tl.arange(0, M)
    real = token < past
    d = tl.arange(0, DP)
    q_at = token.to(tl.int64)[:, None] * (H * D) + head * D + d[None, :]
    q = tl.load(Q + q_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
    position = tl.load(POSITIONS + token, mask=real, other=-1)
    newest = tl.max(position, 0)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    every = tl.arange(0, WIDTH)
    starts = tl.load(STARTS + row * width + every, mask=every < width, other=far)
    columns = tl.sum((starts <= newest).to(tl.int32), 0)  # blocks that begin at or before the newest query
    for start in range(0, columns * BLOCK, N):
        place = start + tl.arange(0, N)
        column = place // BLOCK
        inside = column < width
        begin = tl.load(STARTS + row * width + column, mask=inside, other=far)
        after = tl.load(STARTS + row * width + column + 1, mask=column + 1 < width, other=far)
        there = inside & (begin <= newest)
        key_position = begin + place % BLOCK
        # A block may end early: the next block's start says where (rows share a prompt's last block).
        there = there & (key_position < after) & (key_position <= newest)
        block = tl.load(TABLE + row * width + column, mask=there, other=0).to(tl.int64)
        at = (block * KV + head // (H // KV)) * (BLOCK * D) + (place % BLOCK) * D
        scores = _block_scores(q, KEYS, at, there, scale, D, DP, EXACT)
        seen = there[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen no key yet: -inf - -inf is NaN
        p = tl.exp(scores - safe[:, None])
        fade = tl.exp(best - safe)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(VALUES + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        best = higher
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # the padding of a tile sees nothing
    tl.store(OUT + q_at, out.to(OUT.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


TILE = 64  # tokens of one row that are computed together


def prefill_attention(
    query_THD: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tiles: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    table_RN: torch.Tensor,
    starts_RN: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    far: int,
) -> torch.Tensor:
    """(T, H * D): tokens of rows over the cache, which holds them already. `tiles` are starts of runs of at most TILE
    tokens of one row, and the end."""
    tokens, heads, size = query_THD.shape
    key_heads, block = cache[0].shape[1:3]
    out = query_THD.new_empty(tokens, heads * size)
    exact = query_THD.dtype is torch.float32
    _prefill[(len(tiles) - 1, heads)](
        query_THD, *cache, out, tiles, rows_T, positions_T, table_RN, starts_RN, scale, table_RN.shape[1],
        window or 0, far, heads, key_heads, size, max(16, triton.next_power_of_2(size)), block, TILE,
        KEYS_AT_ONCE, triton.next_power_of_2(table_RN.shape[1]), window is not None, exact,
        num_warps=4, num_stages=1 if exact else 2,
    )  # fmt: skip
    return out
