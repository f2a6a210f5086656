"""Attention over the paged cache: in a decode step the newest token of every row, in prefill tiles of queries.

The cache of a layer is two pools of blocks, (blocks, key heads, BLOCK, D); a row reads its blocks in the order of its
table. In a decode step one program takes one key head of a row and all the queries that share it, so that keys are read
once for a group. It rotates the newest token itself, writes its key and value into the cache, and then reads the blocks
of the row: first those of its prompt, whose last one may have empty places because rows share it, then its own. Only
live keys are read.

Shapes: B rows, C = (H + 2 K) D columns of the product, H query heads, K key heads, G = H / K, D head size, N blocks of
a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.dependent_launch import _wait, comes_early
from posttrain.kernels.cuda.elementwise import _heads, rotate_and_store
from posttrain.kernels.scores import NO_CHANGES, ScoreChanges

PROGRAMS = 1024  # programs that keep the device busy; with fewer, rows are split into pieces
SHORTEST = 256  # keys of a piece, at least
NONE = tl.constexpr(-1e30)  # the score of a masked place: finite, so that no NaN arises, and its weight becomes 0
LOG2_E = tl.constexpr(1.4426950408889634)  # scores are scaled by it, since exponentials are taken to the base 2


@dataclass
class StepRows:
    """The rows of one step: (B,) each, `table` (B, N). `lengths` counts the places of a row in its blocks up to the
    newest token's, empty ones at the end of its prompt included; `slots` says where that is (nowhere: -1).

    `nowhere` is -1 for every row if rows may be tokens of one sequence: all keys then enter the cache before a row
    attends."""

    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    prompts: torch.Tensor
    table: torch.Tensor
    splits: int = 1
    nowhere: torch.Tensor | None = None


@triton.jit
def _capped(scores, cap):
    # cap * tanh(scores / cap); for large scores the exponential is infinite, and the quotient 0.
    return cap - 2.0 * cap / (tl.exp(scores * (2.0 / cap)) + 1.0)


@triton.jit
def _decode(
    QKV, KEYS, VALUES, OUT, PART, PART_MAX, PART_SUM, POSITIONS, SLOTS, LENGTHS, PROMPTS, TABLE, COS, SIN,
    Q_NORM, K_NORM, SINKS, epsilon, scale, cap, columns, width, window,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, NORMED: tl.constexpr, ROTATED: tl.constexpr, CAPPED: tl.constexpr,
    EXACT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        _wait()
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, d, n = tl.arange(0, GP)[:, None], tl.arange(0, DP)[None, :], tl.arange(0, BLOCK)
    real, one = (g < G) & (d < D), d < D
    position = tl.load(POSITIONS + row).to(tl.int64)  # loaded together with the next line: one wait for all
    slot, length, prompt = tl.load(SLOTS + row), tl.load(LENGTHS + row) - 1, tl.load(PROMPTS + row)
    first = d < D // 2
    d_other = tl.where(first, d + D // 2, d - D // 2)
    cos, sin = COS, SIN
    if ROTATED:
        cos, sin = COS + position * D, SIN + position * D
    query_at = row * columns + (head * G + g) * D
    q = _heads(QKV, Q_NORM, cos, sin, query_at + d, query_at + d_other, first, real, d, d_other, epsilon, D, NORMED,
               ROTATED)  # fmt: skip
    factor = scale * LOG2_E
    key_at = row * columns + (KV * G + head) * D
    key = _heads(QKV, K_NORM, cos, sin, key_at + d, key_at + d_other, first, one, d, d_other, epsilon, D, NORMED,
                 ROTATED)  # fmt: skip
    value = tl.load(QKV + key_at + KV * D + d, mask=one, other=0.0)
    newest = split == 0  # the first piece of a row also has the newest token, and writes it to the cache
    into = ((slot // BLOCK) * KV + head) * (BLOCK * D) + (slot % BLOCK) * D + d
    tl.store(KEYS + into, key, mask=one & newest & (slot >= 0))
    tl.store(VALUES + into, value, mask=one & newest & (slot >= 0))
    # The running softmax starts with the newest token itself, whose key and value are in registers.
    own = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1)
    if CAPPED:
        own = _capped(own * scale, cap) * LOG2_E
    else:
        own = own * factor
    best = tl.where(newest, own, NONE)
    total = tl.full([GP], 1.0, tl.float32)
    acc = tl.zeros([GP, DP], tl.float32) + value.to(tl.float32)
    full = (prompt + BLOCK - 1) // BLOCK * BLOCK  # places from `prompt` to here are empty
    each = (length + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    begin = split * each
    end = tl.minimum(begin + each, length)
    inside = n[:, None] * D + d
    for start in range(begin, end, BLOCK):
        place = start + n
        live = (place < end) & ((place < prompt) | (place >= full))
        if WINDOW:
            live = live & (position - tl.where(place < full, place, place - full + prompt) < window)
        block = tl.load(TABLE + row * width + start // BLOCK).to(tl.int64)
        at = (block * KV + head) * (BLOCK * D) + inside
        k = tl.load(KEYS + at, mask=one, other=0.0)
        if EXACT:  # float32 inputs: no TF32, which keeps 10 bits
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k))
        if CAPPED:
            scores = _capped(scores * scale, cap) * LOG2_E
        else:
            scores = scores * factor
        scores = tl.where(live[None, :], scores, NONE)
        higher = tl.maximum(best, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])  # online softmax: earlier sums fade when a larger score appears
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(VALUES + at, mask=live[:, None] & one, other=0.0)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
        best = higher
    if SINKS is not None:  # one more score in the first piece, without a value
        sink = tl.load(SINKS + head * G + tl.arange(0, GP), mask=tl.arange(0, GP) < G, other=0.0).to(tl.float32)
        higher = tl.maximum(best, tl.where(newest, sink * LOG2_E, NONE))
        fade = tl.exp2(best - higher)
        total = total * fade + tl.where(newest, tl.exp2(sink * LOG2_E - higher), 0.0)
        acc, best = acc * fade[:, None], higher
    out_at = (row * (KV * G) + head * G + g) * D + d
    if SPLITS == 1:
        tl.store(OUT + out_at, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=real)
    else:
        part = (row * SPLITS + split) * (KV * G) + head * G + tl.arange(0, GP)
        tl.store(PART + part[:, None] * D + d, acc, mask=real)
        tl.store(PART_MAX + part, best, mask=tl.arange(0, GP) < G)
        tl.store(PART_SUM + part, total, mask=tl.arange(0, GP) < G)


# Pieces of a row are joined like parts of any softmax: each counts by its sum, scaled to the largest maximum.
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
    """Pieces that each row's keys are split into: more if rows are few and long."""
    splits = 1
    while rows * key_heads * splits < PROGRAMS and splits < 32 and longest // (2 * splits) >= SHORTEST:
        splits *= 2
    return splits


def _how(size: int, exact: bool) -> dict[str, int]:
    # One warp per program, and few enough registers that all programs of 1,024 rows run at the same time: with more
    # registers the last ones would wait for the first to end.
    if exact or size > 128:
        return {"num_warps": 4, "num_stages": 1}
    return {"num_warps": 1, "num_stages": 2, "maxnreg": 128 if size <= 64 else 168}


def decode_attention(
    qkv_BC: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    rows: StepRows,
    *,
    scale: float,
    window: int | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
    changes: ScoreChanges = NO_CHANGES,
) -> torch.Tensor:
    """(B, H * D): each row's newest token over its keys and itself; its key and value enter the cache.

    `rotation` (cosines and sines by position, float32) and `norms` (weights of query and key norms) are applied to the
    heads first where given.
    """
    count, columns = qkv_BC.shape
    key_heads, block, size = cache[0].shape[1:]
    heads, splits = columns // size - 2 * key_heads, rows.splits
    assert qkv_BC.is_contiguous()
    out = qkv_BC.new_empty(count, heads * size)
    group, two = heads // key_heads, triton.next_power_of_2
    exact, early = qkv_BC.dtype is torch.float32, comes_early(qkv_BC.device)
    part = best = total = None
    if splits > 1:
        part = qkv_BC.new_empty(count, splits, heads, size, dtype=torch.float32)
        best, total = (qkv_BC.new_empty(count, splits, heads, dtype=torch.float32) for _ in range(2))
    slots = rows.slots
    if rows.nowhere is not None:
        query, key, value = qkv_BC.unflatten(1, (-1, size)).split([heads, key_heads, key_heads], dim=1)
        how = {"rotation": rotation, "norms": norms, "epsilon": epsilon}
        rotate_and_store(query, key, value, cache, rows.positions, slots, **how)
        slots = rows.nowhere
    seen = (rows.positions, slots, rows.lengths, rows.prompts, rows.table)
    _decode[(count, key_heads, splits)](
        qkv_BC, *cache, out, part, best, total, *seen, *(rotation or (None, None)), *(norms or (None, None)),
        changes.sinks_H, epsilon, scale, changes.cap or 0.0, columns, rows.table.shape[1], window or 0,
        key_heads, group, max(16, two(group)), size, max(16, two(size)), block,
        splits, window is not None, norms is not None, rotation is not None, changes.cap is not None, exact, early,
        **_how(size, exact), launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        _join[(count, heads)](part, best, total, out, heads, size, two(size), splits, num_warps=1)
    return out


# -- prefill -----------------------------------------------------------------------------------------------------------
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
    Q, KEYS, VALUES, OUT, TILES, ROWS, POSITIONS, TABLE, STARTS, SINKS, scale, cap, width, window, far,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, EXACT: tl.constexpr,
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
        if CAPPED:
            scores = _capped(scores, cap)
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
    if SINKS is not None:
        sink = tl.load(SINKS + head).to(tl.float32)
        higher = tl.maximum(best, sink)
        fade = tl.exp(best - higher)
        total, acc = total * fade + tl.exp(sink - higher), acc * fade[:, None]
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # the padding of a tile sees nothing
    tl.store(OUT + q_at, out.to(OUT.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


TILE = 64  # tokens of one row that are computed together


def prefill_attention(
    query_THD: torch.Tensor,
    cache: tuple[torch.Tensor, ...],
    tiles: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    table_RN: torch.Tensor,
    starts_RN: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    far: int,
    changes: ScoreChanges = NO_CHANGES,
) -> torch.Tensor:
    """(T, H * D): tokens of rows over the cache, which holds them already. `tiles` are starts of runs of at most TILE
    tokens of one row, and the end."""
    tokens, heads, size = query_THD.shape
    key_heads, block = cache[0].shape[1:3]
    out = query_THD.new_empty(tokens, heads * size)
    exact = query_THD.dtype is torch.float32
    _prefill[(len(tiles) - 1, heads)](
        query_THD, *cache, out, tiles, rows_T, positions_T, table_RN, starts_RN, changes.sinks_H, scale,
        changes.cap or 0.0, table_RN.shape[1], window or 0, far,
        heads, key_heads, size, max(16, triton.next_power_of_2(size)), block, TILE,
        KEYS_AT_ONCE, triton.next_power_of_2(table_RN.shape[1]), window is not None,
        changes.cap is not None, exact,
        num_warps=4, num_stages=1 if exact else 2,
    )  # fmt: skip
    return out
