"""Two parts of one attention, over different keys, made one: each counts by its share of the exponentials' sum.

Shapes: T packed tokens, R of them that have two parts, H heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
    tl.debug_barrier()  # every warp reads what one of them is about to replace
    tl.store(LOGSUM + h * tokens + place, both, mask=h < H)
    at = h[:, None] * D + d[None, :]
    real = (h < H)[:, None] & (d < D)[None, :]
    x = tl.load(OUT + place * (H * D) + at, mask=real, other=0.0)
    y = tl.load(OVER + part * (H * D) + at, mask=real, other=0.0)
    joined = x.to(tl.float32) * tl.exp(mine - both)[:, None] + y.to(tl.float32) * tl.exp(other - both)[:, None]
    tl.store(OUT + place * (H * D) + at, joined.to(x.dtype), mask=real)


def join_parts(out_THD, logsum_HT, over_RHD, over_HR, places_R: torch.Tensor) -> None:
    """Put into `out` and its logarithms of sums what the tokens at `places` saw elsewhere, `over`."""
    heads, size = out_THD.shape[1:]
    assert all(x.is_contiguous() for x in (out_THD, logsum_HT, over_RHD, over_HR))
    two = triton.next_power_of_2
    _join_parts[(len(places_R),)](
        out_THD, logsum_HT, over_RHD, over_HR, places_R, logsum_HT.shape[1], over_HR.shape[1], heads, two(heads),
        size, two(size), num_warps=4,
    )  # fmt: skip
