"""What this machine can do at its best: multiply-adds per second, and bytes per second by size of the data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

MIB = 2**20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
EDGE = 2048  # of the square matrices: large enough for the peak, small enough for a second


def peak_flops(dtype: Any, *, seconds: float = 1.0, device: str = "cpu") -> float:
    """FLOP/s of a large square matmul in `dtype`."""
    import torch

    edge = EDGE if device == "cpu" else 4 * EDGE
    left, right = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    return 2 * edge**3 / _best(lambda: torch.mm(left, right), seconds, device)


def bandwidths(*, seconds: float = 0.2, sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> dict[int, float]:
    """Bytes read per second for data of each size; small data is read from the caches, as small models are."""
    import torch

    found = {}
    for size in sizes:
        data = torch.ones(size // 4, device=device)
        found[size] = size / _best(lambda data=data: data.sum(), seconds, device)
    return found


def bandwidth_for(size: float, measured: dict[int, float]) -> float:
    """Of the smallest measured size that holds `size` bytes; past the largest, that one."""
    return measured[min((s for s in measured if s >= size), default=max(measured))]


def _best(work: Callable[[], object], seconds: float, device: str) -> float:
    """Shortest time of one call, over calls that fill `seconds` (three at least)."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return min(times)
