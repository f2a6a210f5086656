"""What this machine can do at its best (multiply-adds per second, and bytes per second by size of the data), and how
much of it others used while something was measured: without that a table cannot be trusted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
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


class UsedByOthers:
    """Counts from its making: `share()` is the part of all cores that processes outside that session used."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.busy, self.total, self.mine = (*_ticks(), _ticks_of(session))

    def share(self) -> float | None:
        """None where the system does not tell (no /proc)."""
        busy, total = _ticks()
        if total <= self.total:
            return None
        mine = _ticks_of(self.session) - self.mine
        return round(max(0.0, (busy - self.busy - mine) / (total - self.total)), 3)


def _ticks() -> tuple[int, int]:
    """(busy, all) ticks of the machine so far."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _ticks_of(session: int) -> int:
    """Ticks that the processes of a session, and the children that they waited for, have used."""
    used = 0
    for name in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else []):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) == session:
            used += sum(map(int, fields[11:15]))
    return used
