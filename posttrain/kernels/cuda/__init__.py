"""Kernels for CUDA devices, written in Triton; each has a torch twin elsewhere that serves where Triton is missing.

Counts that differ from batch to batch are `do_not_specialize`: Triton would compile a kernel once more when such a
number first is, or is not, divisible by 16, and a run would stand still for half a second in the middle.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

# Sizes of captured decoding, which engines and memory plans count with too.
MOST_STEPS = 256  # of one round: some seconds with a large model, in which nobody hears of progress
MOST_TOKENS = MOST_STEPS + 1  # that a row can have made in it: its first one may be there when it joins
STEPS_UNSEEN = 16  # of a round in which rows may end: one that does stands still until it is over
FINE = 64  # logits of a chunk; those of the one that a row's token comes from are computed again
DEPTH = 64  # columns that a product with its sums inside multiplies at once
LEAST_ROWS = 128  # of a step whose head writes sums of chunks and no logits: below it torch's product is as fast


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def runs_here(tensor: torch.Tensor) -> bool:
    """Whether these kernels take this tensor: on a CUDA device, in a type that its matrix units multiply."""
    return tensor.is_cuda and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and has_triton()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor there, without waiting for what the device is doing."""
    if tensor.is_meta:  # stands for one of whatever device
        return tensor
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def bucket(rows: int) -> int:
    """The number of rows that a graph for so many has: powers of two, and one and a half times them."""
    size = 8
    while size < rows:
        if size * 3 // 2 >= rows and size >= 16:
            return size * 3 // 2
        size *= 2
    return size
