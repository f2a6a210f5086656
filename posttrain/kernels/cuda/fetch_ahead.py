"""Keys and values on their way before attention asks for them. While the products before it compute, memory has little
to do: what is named here comes into the device's own cache meanwhile.

Each row names the blocks that its walk begins with: those of its prompt, unless the row before it has the same, and the
first of its own. A hint: it changes no number.

Shapes: B rows, N blocks of a row.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from posttrain.kernels.cuda.decode_attention import StepRows
from posttrain.kernels.cuda.elementwise import _norm_row, add_rms_norm, norm_shape

PIECE = tl.constexpr(2048)  # bytes that one thread names, as `_name` has it
SHARE = 0.34  # of the device's cache that rows fill with blocks of their own


@triton.jit
def _wanted(LENGTHS, PROMPTS, TABLE, row, width, own, THREADS: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr):
    """(block, piece of it, whether there is one) for each thread; a block has BOTH pieces, of keys and of values."""
    t = tl.arange(0, THREADS)
    length, prompt = tl.load(LENGTHS + row) - 1, tl.load(PROMPTS + row)
    first, before = tl.load(TABLE + row * width), tl.load(TABLE + tl.maximum(row - 1, 0) * width)
    of_prompt = (prompt + BLOCK - 1) // BLOCK * BOTH
    leading = tl.where((row == 0) | (first != before), of_prompt, 0)
    piece = tl.where(t < leading, t, of_prompt + t - leading)
    real = (t < leading + own) & (piece // BOTH * BLOCK < length)
    block = tl.load(TABLE + row * width + piece // BOTH, mask=real, other=0)
    return block, piece % BOTH, real


@triton.jit
def _name(address, real):
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0; }",
        "=r,l,r", [address, real.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _fetch(KEYS, VALUES, LENGTHS, PROMPTS, TABLE, row, width, own,
           THREADS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """SIZE: bytes of a block's keys, and of its values."""
    block, piece, real = _wanted(LENGTHS, PROMPTS, TABLE, row, width, own, THREADS, BLOCK, 2 * SIZE // PIECE)
    inside = block.to(tl.int64) * SIZE + piece // 2 * PIECE
    _name(tl.where(piece % 2 == 0, KEYS.to(tl.int64), VALUES.to(tl.int64)) + inside, real)


@triton.jit
def _add_rms_norm_ahead(
    RES, ADD, WEIGHT, OUT, size, epsilon, KEYS, VALUES, LENGTHS, PROMPTS, TABLE, width, own,
    HAS_ADD: tl.constexpr, COLUMNS: tl.constexpr, THREADS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    _fetch(KEYS, VALUES, LENGTHS, PROMPTS, TABLE, tl.program_id(0), width, own, THREADS, BLOCK, SIZE)
    _norm_row(RES, ADD, WEIGHT, OUT, size, epsilon, HAS_ADD, COLUMNS)


def add_rms_norm_ahead(
    residual_BE: torch.Tensor,
    added_BE: torch.Tensor | None,
    weight_E: torch.Tensor,
    epsilon: float,
    cache: tuple[torch.Tensor, torch.Tensor],
    rows: StepRows,
) -> torch.Tensor:
    """The norm of `residual + added` (the sum stays in `residual`), and the way of what the layer's attention reads
    first has begun."""
    own, size = _own_pieces(len(rows.lengths), cache[0]), residual_BE.shape[1]
    if not own:
        return add_rms_norm(residual_BE, added_BE, weight_E, epsilon)
    out = torch.empty_like(residual_BE)
    columns, warps = norm_shape(size)
    _add_rms_norm_ahead[(len(residual_BE),)](
        residual_BE, added_BE, weight_E, out, size, epsilon, *cache, rows.lengths, rows.prompts, rows.table,
        rows.table.shape[1], own, added_BE is not None, columns, 32 * warps, cache[0].shape[2], _bytes(cache[0]),
        num_warps=warps,
    )  # fmt: skip
    return out


def _own_pieces(rows: int, keys: torch.Tensor) -> int:
    """Pieces of its own blocks that each row names; none where there is no such instruction."""
    if not keys.is_cuda or _bytes(keys) % PIECE.value:
        return 0
    return int(SHARE * _cache_of(keys.device)) // (rows * PIECE.value)


def _bytes(keys: torch.Tensor) -> int:
    """Of the keys in a block."""
    return keys[0].numel() * keys.element_size()


@cache
def _cache_of(device: torch.device) -> int:
    """Bytes of the device's own cache."""
    chip = torch.cuda.get_device_properties(device)
    return chip.L2_cache_size if chip.major >= 9 else 0
