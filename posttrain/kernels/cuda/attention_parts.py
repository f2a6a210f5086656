"""Attention in two parts, over different keys: their outputs joined, and the gradients of shared tokens added.

Responses that share a prompt attend to themselves and to their prompt in two calls (`flash.py`). Each part counts by
its share of the exponentials' sum.

Shapes: T packed tokens, R rows of the other part, P of copies, C numbers of a row, N tokens that have copies, H heads, D
head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

TOGETHER = tl.constexpr(8)  # copies that are loaded before the first of them is added


# Gradients are added by one program per token, in float32 and in a fixed order, and rounded once. torch's `index_add_`
# adds by atomics, in any order, and sorts its rows first under `trainer.deterministic`.


@triton.jit
def _add_rows(OWN, MORE, PLACES, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    to = OWN + tl.load(PLACES + row) * size + at
    own = tl.load(to, mask=real, other=0.0)
    more = tl.load(MORE + row * size + at, mask=real, other=0.0)
    tl.store(to, (own.to(tl.float32) + more.to(tl.float32)).to(own.dtype), mask=real)


def add_rows(own_TC: torch.Tensor, more_RC: torch.Tensor, places_R: torch.Tensor) -> torch.Tensor:
    """Add every row of the other part at its place, in place; no two rows have the same place."""
    own, size, block = own_TC.contiguous(), *_sizes(own_TC)
    grid = (len(places_R), triton.cdiv(size, block))
    _add_rows[grid](own, more_RC.contiguous(), places_R, size, block, num_warps=1 if block <= 256 else 4)
    return own


@triton.jit
def _sum_of_copies(OWN, MORE, ORDER, place, first, count, size, at, real):
    own = tl.load(OWN + place * size + at, mask=real, other=0.0)
    total = own.to(tl.float32)
    for start in range(0, count, TOGETHER):
        for number in tl.static_range(TOGETHER):
            here = real & (start + number < count)
            row = tl.load(ORDER + first + start + number, mask=start + number < count, other=0)
            copy = tl.load(MORE + row * size + at, mask=here, other=0.0)
            total += copy.to(tl.float32)
    tl.store(OWN + place * size + at, total.to(own.dtype), mask=real)


@triton.jit
def _add_copies(KEY, KEY_MORE, VALUE, VALUE_MORE, COPIES, ORDER, size, BLOCK: tl.constexpr):
    token = tl.program_id(0)
    place, first = tl.load(COPIES + 3 * token), tl.load(COPIES + 3 * token + 1)
    count = tl.load(COPIES + 3 * token + 2)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    if tl.program_id(2) == 0:
        _sum_of_copies(KEY, KEY_MORE, ORDER, place, first, count, size, at, real)
    else:
        _sum_of_copies(VALUE, VALUE_MORE, ORDER, place, first, count, size, at, real)


def add_copies(
    own: Sequence[torch.Tensor], more: Sequence[torch.Tensor], copies_N3: torch.Tensor, copy_P: torch.Tensor
):
    """Keys and values (T, C), in place, with what their copies (P, C) have.

    `copies`, int64: the place of a token, where in `copy_P` the rows of its copies are listed, and how many there are.
    They are added in that order.
    """
    key, key_more, value, value_more = (x.contiguous() for pair in zip(own, more, strict=True) for x in pair)
    size, block = _sizes(key)
    grid = (len(copies_N3), triton.cdiv(size, block), 2)
    warps = 1 if block <= 256 else 4
    _add_copies[grid](key, key_more, value, value_more, copies_N3, copy_P, size, block, num_warps=warps)
    return [key, value]


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    # Numbers of a row, and how many of them one program takes.
    size = x.shape[1:].numel()
    return size, min(triton.next_power_of_2(size), 4096)


@triton.jit(do_not_specialize=["tokens", "parts"])
def _join_parts(OUT, LOGSUM, OVER, OVER_LOGSUM, PLACES, tokens, parts, H: tl.constexpr, HP: tl.constexpr,
                D: tl.constexpr, DP: tl.constexpr):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    place = tl.load(PLACES + part)
    h, d = tl.arange(0, HP), tl.arange(0, DP)
    mine = tl.load(LOGSUM + h * tokens + place, mask=h < H, other=0.0)
    other = tl.load(OVER_LOGSUM + h * parts + part, mask=h < H, other=0.0)
    most = tl.maximum(mine, other)
    both = most + tl.log(tl.exp(mine - most) + tl.exp(other - most))
    # The sum is replaced in place. Without the barrier one warp could store it before another has read the old one,
    # which weighed some heads wrongly, differently in every process.
    tl.debug_barrier()
    tl.store(LOGSUM + h * tokens + place, both, mask=h < H)
    at = h[:, None] * D + d[None, :]
    real = (h < H)[:, None] & (d < D)[None, :]
    x = tl.load(OUT + place * (H * D) + at, mask=real, other=0.0)
    y = tl.load(OVER + part * (H * D) + at, mask=real, other=0.0)
    joined = x.to(tl.float32) * tl.exp(mine - both)[:, None] + y.to(tl.float32) * tl.exp(other - both)[:, None]
    tl.store(OUT + place * (H * D) + at, joined.to(x.dtype), mask=real)


def join_parts(out_THD, logsum_HT, over_RHD, over_HR, places_R: torch.Tensor) -> None:
    """Join into `out` and its log-sums what the tokens at `places` saw in the other part, `over`."""
    heads, size = out_THD.shape[1:]
    assert all(x.is_contiguous() for x in (out_THD, logsum_HT, over_RHD, over_HR))
    two = triton.next_power_of_2
    _join_parts[(len(places_R),)](
        out_THD, logsum_HT, over_RHD, over_HR, places_R, logsum_HT.shape[1], over_HR.shape[1], heads, two(heads),
        size, two(size), num_warps=4,
    )  # fmt: skip
