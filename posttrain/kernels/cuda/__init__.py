"""Kernels for CUDA devices, written in Triton; each has a torch equivalent for machines without Triton.

Counts that differ from batch to batch are `do_not_specialize`: Triton compiles a kernel again when such a number first
is, or is not, divisible by 16, and a run would stop for half a second in the middle. This file imports no Triton.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# Sizes of captured decoding, which engines and memory plans count with too.
MOST_STEPS = 256  # of one round: some seconds with a large model, without any sign of progress
MOST_TOKENS = MOST_STEPS + 1  # of a row in one round: its first one comes from prefill
STEPS_UNSEEN = 16  # of a round in which rows may end: an ended row is idle until the round is over
FINE = 64  # logits of a chunk of the fused head; those of the sampled token's chunk are computed again
DEPTH = 64  # numbers of a row that a fused product multiplies at once
LEAST_ROWS = 128  # of a step with the fused head, which writes no logits: below it torch's product is as fast


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def runs_here(tensor: torch.Tensor) -> bool:
    """Whether these kernels take this tensor: on a CUDA device, in a type that its matrix units multiply."""
    return tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and has_triton()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, copied without waiting for the device's queue."""
    if tensor.is_meta:  # memory plans count with tensors of no device
        return tensor
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    # Only copies from pinned memory are asynchronous.
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def bucket(rows: int) -> int:
    """The batch size of the graph for so many rows: 8, 16, 24, 32, 48, 64, ..."""
    size = 8
    while size < rows:
        if size * 3 // 2 >= rows and size >= 16:
            return size * 3 // 2
        size *= 2
    return size
