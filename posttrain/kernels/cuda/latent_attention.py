"""Attention of all heads to cached latents (MLA). The cache of a layer is one pool, (blocks, BLOCK, C): a latent of R
numbers and a rotated part of P. A latent is key and value at once, so it is read once for all heads of a program.

One kernel serves decode steps, where a tile is the newest token of a row, and prefill, where it is some tokens of a
row. A program takes some heads of a tile's tokens as the rows of its matrices, so that matrix units are filled by heads
even where a row has one token.

Shapes: T tokens, H heads, C = R + P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.paged_attention import LOG2_E, NONE, TILE, StepRows, _join

ROWS = 64  # (token, head) pairs of a program, at most
LEAST = 16  # that matrix units take


@triton.jit
def _store(LATENT, CACHE, SLOTS, row, C: tl.constexpr, CP: tl.constexpr):
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, CP)
    slot = tl.load(SLOTS + token)
    if slot >= 0:  # below 0 there is no place to store it
        x = tl.load(LATENT + token * row + c, mask=c < C, other=0.0)
        tl.store(CACHE + slot * C + c, x, mask=c < C)


def store_latents(latent_TC: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Latents to their slots (block x BLOCK + place; none below 0)."""
    tokens, size = latent_TC.shape
    assert latent_TC.stride(1) == 1
    if tokens:
        padded = triton.next_power_of_2(size)
        _store[(tokens,)](latent_TC, cache, slots_T, latent_TC.stride(0), size, padded, num_warps=4)


@triton.jit
def _begin_of(column, STARTS, row, width, far, prompt, full, GAPPED: tl.constexpr, BLOCK: tl.constexpr):
    # The position at which a block of a row starts. In captured steps a row has one gap at most, behind its prompt.
    if GAPPED:
        begin = column * BLOCK - tl.where(column * BLOCK >= full, full - prompt, 0)
    else:
        begin = tl.load(STARTS + row * width + column, mask=column < width, other=far)
    return begin


@triton.jit(do_not_specialize=["width", "far"])
def _attend(
    Q, CACHE, OUT, PART, PART_MAX, PART_SUM, TILES, ROW_OF, POSITIONS, LENGTHS, PROMPTS, TABLE, STARTS,
    scale, width, far,
    H: tl.constexpr, HG: tl.constexpr, MT: tl.constexpr, SUB: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    P: tl.constexpr, PP: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    GAPPED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(2)
    m = tl.arange(0, MT * HG)
    head = tl.program_id(1) * HG + m % HG
    if GAPPED:
        row = tile
        token = tile + m // HG
        real = head < H
    else:
        first, past = tl.load(TILES + tile // SUB) + tile % SUB * MT, tl.load(TILES + tile // SUB + 1)
        row = tl.load(ROW_OF + tl.minimum(first, past - 1))  # a tile has tokens of one row only
        token = first + m // HG
        real = (head < H) & (token < past)
    position = tl.load(POSITIONS + token, mask=real, other=-1)
    newest = tl.max(position, 0)
    r, p = tl.arange(0, RP), tl.arange(0, PP)
    at = (token.to(tl.int64) * H + head)[:, None]
    q = tl.load(Q + at * (R + P) + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
    turned = tl.load(Q + at * (R + P) + R + p[None, :], mask=real[:, None] & (p < P)[None, :], other=0.0)
    prompt, full = 0, 0
    if GAPPED:
        prompt = tl.load(PROMPTS + row)
        full = (prompt + BLOCK - 1) // BLOCK * BLOCK
        columns = (tl.load(LENGTHS + row) + BLOCK - 1) // BLOCK
    else:
        every = tl.arange(0, WIDTH)
        starts = tl.load(STARTS + row * width + every, mask=every < width, other=far)
        columns = tl.sum((starts <= newest).to(tl.int32), 0)
    best = tl.full([MT * HG], NONE, tl.float32)
    total = tl.zeros([MT * HG], tl.float32)
    acc = tl.zeros([MT * HG, RP], tl.float32)
    factor = scale * LOG2_E
    each = (columns + SPLITS - 1) // SPLITS
    n = tl.arange(0, BLOCK)
    for column in range(split * each, tl.minimum(split * each + each, columns)):
        key_position = _begin_of(column, STARTS, row, width, far, prompt, full, GAPPED, BLOCK) + n
        there = key_position < _begin_of(column + 1, STARTS, row, width, far, prompt, full, GAPPED, BLOCK)
        there = there & (key_position <= newest)
        block = tl.load(TABLE + row * width + column).to(tl.int64)
        place = (block * BLOCK + n)[:, None] * (R + P)
        c = tl.load(CACHE + place + r[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)
        k = tl.load(CACHE + place + R + p[None, :], mask=there[:, None] & (p < P)[None, :], other=0.0)
        if EXACT:
            scores = tl.dot(turned, tl.trans(k), input_precision="ieee")
            scores = tl.dot(q, tl.trans(c), scores, input_precision="ieee")
        else:
            scores = tl.dot(turned, tl.trans(k))
            scores = tl.dot(q, tl.trans(c), scores)
        seen = there[None, :] & (key_position[None, :] <= position[:, None])
        scores = tl.where(seen, scores * factor, NONE)
        higher = tl.maximum(best, tl.max(scores, 1))
        weight = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(weight, 1)
        if EXACT:
            acc = acc * fade[:, None] + tl.dot(weight, c, input_precision="ieee")
        else:
            acc = acc * fade[:, None] + tl.dot(weight.to(c.dtype), c)
        best = higher
    there = real[:, None] & (r < R)[None, :]
    if SPLITS == 1:
        out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # padding sees nothing
        tl.store(OUT + at * R + r[None, :], out.to(OUT.dtype.element_ty), mask=there)
    else:
        part = (token.to(tl.int64) * SPLITS + split) * H + head
        tl.store(PART + part[:, None] * R + r[None, :], acc, mask=there)
        tl.store(PART_MAX + part, best, mask=real)
        tl.store(PART_SUM + part, total, mask=real)


def _sizes(heads: int, rank: int, rotated: int, tokens: int) -> tuple[int, ...]:
    # Heads and tokens of a program, tiles of a wide tile, and the padded sizes.
    two = triton.next_power_of_2
    group = min(ROWS, max(LEAST, two(heads)))
    together = min(tokens, max(1, ROWS // group))
    padded = (rank, max(16, two(rank)), rotated, max(16, two(rotated)))
    return heads, group, together, TILE // together, *padded


def _how(exact: bool, rows: int) -> dict[str, int]:
    return {"num_warps": 4 if rows <= LEAST else 8, "num_stages": 1 if exact else 2}


def prefill_latents(
    query_THC: torch.Tensor,
    cache: torch.Tensor,
    tiles: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    table_RN: torch.Tensor,
    starts_RN: torch.Tensor,
    *,
    rank: int,
    scale: float,
    far: int,
) -> torch.Tensor:
    """(T, H, R): tokens of rows over the cache, which holds them already; arguments as of `prefill_attention`."""
    tokens, heads, size = query_THC.shape
    out, width = query_THC.new_empty(tokens, heads, rank), table_RN.shape[1]
    sizes, exact = _sizes(heads, rank, size - rank, TILE), query_THC.dtype is torch.float32
    grid = ((len(tiles) - 1) * sizes[3], triton.cdiv(heads, sizes[1]), 1)
    _attend[grid](
        query_THC, cache, out, None, None, None, tiles, rows_T, positions_T, None, None, table_RN, starts_RN, scale,
        width, far, *sizes, cache.shape[1], triton.next_power_of_2(width), 1, False, exact,
        **_how(exact, sizes[1] * sizes[2]),
    )  # fmt: skip
    return out


def decode_latents(
    query_BHC: torch.Tensor, latent_BC: torch.Tensor, cache: torch.Tensor, rows: StepRows, *, rank: int, scale: float
) -> torch.Tensor:
    """(B, H, R): each row's newest token over the latents of its row; its own enters the cache."""
    count, heads, size = query_BHC.shape
    store_latents(latent_BC, cache, rows.slots)
    out, splits = query_BHC.new_empty(count, heads, rank), rows.splits
    sizes, exact = _sizes(heads, rank, size - rank, 1), query_BHC.dtype is torch.float32
    part = best = total = None
    if splits > 1:
        part = query_BHC.new_empty(count, splits, heads, rank, dtype=torch.float32)
        best, total = (query_BHC.new_empty(count, splits, heads, dtype=torch.float32) for _ in range(2))
    _attend[(count, triton.cdiv(heads, sizes[1]), splits)](
        query_BHC, cache, out, part, best, total, None, None, rows.positions, rows.lengths, rows.prompts, rows.table,
        None, scale, rows.table.shape[1], 0, *sizes, cache.shape[1], 1, splits, True, exact,
        **_how(exact, sizes[1]),
    )  # fmt: skip
    if splits > 1:
        _join[(count, heads)](part, best, total, out, heads, rank, triton.next_power_of_2(rank), splits, num_warps=4)
    return out
