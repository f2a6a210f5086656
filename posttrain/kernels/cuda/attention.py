"""Attention over the paged cache: one query per row (decoding), and tiles of queries (prompts).

The cache of a layer is two pools of blocks, (blocks, key heads, BLOCK, D). A row reads its blocks in the order of its
table: first those of its prompt, whose last one may have empty places, then its own. Only what is there is read.

Shapes: T tokens, B rows, H query heads, K key heads, G = H / K, D head size, N blocks of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS_AT_ONCE = 64
PROGRAMS = 1024  # programs that keep the device busy; fewer rows than that are cut into pieces
NONE = tl.constexpr(-1e30)  # the score of a place that nobody sees; finite, and any real score makes its weight 0
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _block_scores(q, KEYS, at, live, scale, D: tl.constexpr, DP: tl.constexpr, EXACT: tl.constexpr):
    d = tl.arange(0, DP)
    k = tl.load(KEYS + at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    if EXACT:
        return tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        return tl.dot(q, tl.trans(k)) * scale


@triton.jit
def _decode(
    Q, KEYS, VALUES, OUT, PART, PART_MAX, PART_SUM, LENGTHS, PROMPTS, TABLE, scale, width, window,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(LENGTHS + row)  # places of the row, the prompt's empty ones included
    prompt = tl.load(PROMPTS + row)
    full = (prompt + BLOCK - 1) // BLOCK * BLOCK
    g, d, n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    base = row.to(tl.int64) * (KV * G * D) + head * G * D
    q = tl.load(Q + base + g[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)
    best = tl.full([GP], NONE, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DP], tl.float32)
    each = (length + SPLITS * N - 1) // (SPLITS * N) * N
    begin = split * each
    end = tl.minimum(begin + each, length)
    newest = length - 1 - (full - prompt)
    inside = (n % BLOCK)[:, None] * D + d[None, :]
    for start in range(begin, end, N):
        place = start + n
        live = (place < end) & ((place < prompt) | (place >= full))
        if WINDOW:
            position = tl.where(place < full, place, place - full + prompt)
            live = live & (newest - position < window)
        if N == BLOCK:
            block = tl.load(TABLE + row * width + start // BLOCK).to(tl.int64)
            at = (block * KV + head) * (BLOCK * D) + inside
        else:
            block = tl.load(TABLE + row * width + place // BLOCK, mask=place < end, other=0).to(tl.int64)
            at = ((block * KV + head) * (BLOCK * D))[:, None] + inside
        k = tl.load(KEYS + at, mask=(d < D)[None, :], other=0.0)
        if EXACT:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        scores = tl.where(live[None, :], scores * (scale * LOG2_E), NONE)
        higher = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(VALUES + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        best = higher
    real = (g < G)[:, None] & (d < D)[None, :]
    if SPLITS == 1:
        out = acc / total[:, None]
        tl.store(OUT + base + g[:, None] * D + d[None, :], out.to(OUT.dtype.element_ty), mask=real)
    else:
        part = (row.to(tl.int64) * SPLITS + split) * (KV * G) + head * G
        tl.store(PART + part * D + g[:, None] * D + d[None, :], acc, mask=real)
        tl.store(PART_MAX + part + g, best, mask=g < G)
        tl.store(PART_SUM + part + g, total, mask=g < G)


@triton.jit
def _join(PART, PART_MAX, PART_SUM, OUT, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    part = (row * SPLITS + s) * H + head
    best = tl.load(PART_MAX + part)
    weight = tl.exp2(best - tl.max(best, 0))
    total = tl.sum(weight * tl.load(PART_SUM + part), 0)
    acc = tl.load(PART + part[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / total
    tl.store(OUT + (row * H + head) * D + d, out.to(OUT.dtype.element_ty), mask=d < D)


def splits_for(rows: int, key_heads: int, longest: int) -> int:
    """Pieces that each row's keys are cut into: more where rows are few and long."""
    splits = 1
    while rows * key_heads * splits < PROGRAMS and splits < 32 and longest // (2 * splits) >= 4 * KEYS_AT_ONCE:
        splits *= 2
    return splits


def decode_attention(
    query_BHD: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    table_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    prompts_B: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    splits: int = 1,
) -> torch.Tensor:
    """(B, H * D): each row's query over all its keys, the newest included.

    `lengths_B` counts the places of a row in its blocks, empty ones at the end of its prompt included.
    """
    rows, heads, size = query_BHD.shape
    key_heads, block = cache[0].shape[1:3]
    out = query_BHD.new_empty(rows, heads * size)
    group = heads // key_heads
    exact = query_BHD.dtype is torch.float32
    sizes = (key_heads, group, max(16, triton.next_power_of_2(group)), size, max(16, triton.next_power_of_2(size)))
    part = best = total = None
    if splits > 1:
        part = query_BHD.new_empty(rows, splits, heads, size, dtype=torch.float32)
        best, total = (query_BHD.new_empty(rows, splits, heads, dtype=torch.float32) for _ in range(2))
    # Small heads: a block at a time by one warp, of which many run beside each other.
    keys, warps = (block, 1) if size <= 64 and not exact else (KEYS_AT_ONCE, 2)
    if exact and size > 64:
        keys = KEYS_AT_ONCE // 2
    _decode[(rows, key_heads, splits)](
        query_BHD, *cache, out, part, best, total, lengths_B, prompts_B, table_BN, scale, table_BN.shape[1],
        window or 0, *sizes, block, keys, splits, window is not None, exact,
        num_warps=warps, num_stages=1 if exact else 2,
    )  # fmt: skip
    if splits > 1:
        _join[(rows, heads)](part, best, total, out, heads, size, triton.next_power_of_2(size), splits, num_warps=1)
    return out


@triton.jit
def _prefill(
    Q, KEYS, VALUES, OUT, TILES, ROWS, POSITIONS, TABLE, STARTS, scale, width, window, far,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first, past = tl.load(TILES + tile), tl.load(TILES + tile + 1)
    row = tl.load(ROWS + first)
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
    columns = tl.sum((starts <= newest).to(tl.int32), 0)
    for start in range(0, columns * BLOCK, N):
        place = start + tl.arange(0, N)
        column = place // BLOCK
        inside = column < width
        begin = tl.load(STARTS + row * width + column, mask=inside, other=far)
        after = tl.load(STARTS + row * width + column + 1, mask=column + 1 < width, other=far)
        there = inside & (begin <= newest)
        key_position = begin + place % BLOCK
        there = there & (key_position < after) & (key_position <= newest)
        block = tl.load(TABLE + row * width + column, mask=there, other=0).to(tl.int64)
        at = (block * KV + head // (H // KV)) * (BLOCK * D) + (place % BLOCK) * D
        scores = _block_scores(q, KEYS, at, there, scale, D, DP, EXACT)
        seen = there[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(scores - safe[:, None])
        fade = tl.exp(best - safe)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(VALUES + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        best = higher
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
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
        KEYS_AT_ONCE // 2, triton.next_power_of_2(table_RN.shape[1]), window is not None, exact,
        num_warps=4, num_stages=1 if exact else 2,
    )  # fmt: skip
    return out
