"""Kernels for CUDA devices, written in Triton; each has a torch twin elsewhere that serves where Triton is missing.

Counts that differ from batch to batch are `do_not_specialize`: Triton would compile a kernel once more when such a
number first is, or is not, divisible by 16, and a run would stand still for half a second in the middle.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


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
