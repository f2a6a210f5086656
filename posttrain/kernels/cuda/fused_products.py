"""Matrix products of a decode step fused with what follows, for many rows on Hopper's matrix units: the head with the
sums of its logits, which are never written, and gate and up with their gating.

Shapes: B rows, E width of the model, V vocabulary, I width of the gated layer, C chunks of the vocabulary.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from posttrain.kernels.cuda import DEPTH, FINE
from posttrain.kernels.cuda.dependent_launch import _wait, comes_early

LEAST_GATED = 512  # rows; with fewer, torch's products are as fast
NARROW, WIDE = 1024, 3072  # gating inside pays for models up to NARROW and from WIDE on, each with its own tiles


@cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


# Hopper only (capability 9): the tiles are shaped for its matrix units, and loads go through its copy engine.
def takes(x_BE: torch.Tensor, weight_FE: torch.Tensor | None, least: int) -> bool:
    """Whether this module computes the product of these rows with this weight, and faster than torch."""
    if weight_FE is None or not x_BE.is_cuda or x_BE.dtype not in (torch.bfloat16, torch.float16):
        return False
    return len(x_BE) >= least and x_BE.shape[1] % DEPTH == 0 and _hopper(x_BE.device)


@triton.jit
def _head_sums(
    X, W, TEMPERATURE, MAX, SUM, rows, V, chunks,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(rows, BM)
    each: tl.constexpr = BN // CHUNK
    # Persistent programs, one per processor; neighbouring tiles share their columns of the weight, the larger matrix.
    for tile in tl.range(tl.program_id(0), tiles_m * tl.cdiv(V, BN), PROGRAMS, flatten=True):
        m, n = tile % tiles_m, tile // tiles_m
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, E, BK):
            acc = tl.dot(X.load([m * BM, k]), W.load([n * BN, k]).T, acc)
        row = m * BM + tl.arange(0, BM)
        real = row < rows
        # To the base 2 (1.4427 = log2 e): the maximum of each chunk and the sum of exponentials over it are all that
        # sampling and log-probs need, and the logits never leave the registers.
        x = acc * (1.4426950408889634 / tl.load(TEMPERATURE + row, mask=real, other=1.0))[:, None]
        x = tl.where((n * BN + tl.arange(0, BN) < V)[None, :], x, float("-inf"))
        x = tl.reshape(x, [BM, each, CHUNK])
        top = tl.max(x, 2)
        safe = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(x - safe[:, :, None]), 2)
        chunk = n * each + tl.arange(0, each)
        into = row.to(tl.int64)[:, None] * chunks + chunk[None, :]
        there = real[:, None] & (chunk < chunks)[None, :]
        tl.store(MAX + into, top * 0.6931471805599453, mask=there)
        tl.store(SUM + into, total, mask=there)


def head_sums(
    x_BE: torch.Tensor, weight_VE: torch.Tensor, temperature_B: torch.Tensor, room: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Divide each row's logits by its temperature, and write the maximum of every chunk of FINE logits and the sum of
    exponentials relative to it into `room`: two tensors (B, C)."""
    rows, width = x_BE.shape
    size, tile = len(weight_VE), (128, 256)
    programs = _processors(x_BE.device)
    _head_sums[(programs,)](
        _tiles(x_BE, tile[0]), _tiles(weight_VE, tile[1]), temperature_B, *room, rows, size, triton.cdiv(size, FINE),
        width, *tile, DEPTH, FINE, programs, num_warps=8, num_stages=4,
    )  # fmt: skip


@triton.jit
def _gate(gate, up, KIND: tl.constexpr):
    # Rounded where torch rounds, so that captured steps and the torch path agree.
    wide = gate.to(KIND).to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(KIND).to(tl.float32)
    return (silu * up.to(KIND).to(tl.float32)).to(KIND)


@triton.jit
def _gated_tile(X, W, OUT, tile, rows, size, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles_m = tl.cdiv(rows, BM)
    m, n = tile % tiles_m, tile // tiles_m
    acc = tl.zeros([BM, 2 * BN], tl.float32)  # gate and up in one product: X is read once for both
    for k in range(0, E, BK):
        weight = tl.reshape(W.load([0, n * BN, k]), [2 * BN, BK])
        acc = tl.dot(X.load([m * BM, k]), weight.T, acc)
    gate, up = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), [0, 2, 1]))
    OUT.store([m * BM, n * BN], _gate(gate, up, X.dtype))


@triton.jit
def _gated(
    X, W, OUT, rows, size, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        _wait()
    _gated_tile(X, W, OUT, tl.program_id(0), rows, size, E, BM, BN, BK)


@triton.jit
def _gated_in_turn(
    X, W, OUT, rows, size,
    E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), tl.cdiv(rows, BM) * tl.cdiv(size, BN), PROGRAMS):
        _gated_tile(X, W, OUT, tile, rows, size, E, BM, BN, BK)


def takes_gated(x_BE: torch.Tensor, weight_2IE: torch.Tensor | None) -> bool:
    """The same for `gated_product`. Its result is written by tiles, so its rows must begin at multiples of 16 bytes."""
    if weight_2IE is None or len(weight_2IE) % 16 or NARROW < x_BE.shape[1] < WIDE:
        return False
    return takes(x_BE, weight_2IE, LEAST_GATED)


def gated_product(x_BE: torch.Tensor, weight_2IE: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, (B, I). The weight holds the rows of gate, then those of up."""
    rows, width = x_BE.shape
    size = len(weight_2IE) // 2
    out = x_BE.new_empty(rows, size)
    tile = (128, 128) if width >= WIDE else (128, 64)
    across = weight_2IE.stride(0)
    both = TensorDescriptor(weight_2IE, [2, size, width], [size * across, across, 1], [2, tile[1], DEPTH])
    into = TensorDescriptor(out, [rows, size], [size, 1], list(tile))
    given = (_tiles(x_BE, tile[0]), both, into, rows, size, width, *tile, DEPTH)
    if width >= WIDE:
        programs = _processors(x_BE.device)
        _gated_in_turn[(programs,)](*given, programs, num_warps=8, num_stages=4)
    else:
        programs, early = triton.cdiv(rows, tile[0]) * triton.cdiv(size, tile[1]), comes_early(x_BE.device)
        stages = _stages(programs, _processors(x_BE.device))
        _gated[(programs,)](*given, early, num_warps=4, num_stages=stages, launch_pdl=early)
    return out


def _stages(programs: int, processors: int) -> int:
    # With three stages of loads in shared memory, two programs fit on a processor; with two stages, three. Choose what
    # finishes first, assuming that programs on one processor slow each other down in proportion to their number.
    two, three = (triton.cdiv(programs, beside * processors) * beside for beside in (2, 3))
    return 3 if two < three else 2


def _tiles(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, DEPTH])


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
