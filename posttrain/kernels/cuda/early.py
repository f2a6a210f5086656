"""Kernels that come to the processors while the one before them ends, and wait there for what it wrote: what lies
between two kernels of a captured step is as long as some of them."""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _wait():
    """All that earlier kernels wrote is there; the first thing that such a kernel does. The next may come meanwhile."""
    gdc_wait()
    gdc_launch_dependents()


@cache
def comes_early(device: torch.device) -> bool:
    """Whether kernels are launched so on this device: Hopper and later can."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
