"""Host memory in large pages: tensors that are read from end to end in every step then miss no addresses on the way."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

LARGE = 2**21


def zeros_in_large_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the host; memory is taken when it is first written."""
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
