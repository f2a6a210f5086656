"""StagePeaks: the most memory that each stage of a step took, in GB (10^9 bytes).

On a CUDA device what torch allocated there; otherwise what this process held resident, where the kernel tells.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class StagePeaks:
    """`begin` before a stage, `end` after it; `take` gives what was measured and begins anew."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                _RESET.write_text("5")  # the kernel's high-water mark starts from now

    def end(self, stage: str) -> None:
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else resident_peak()
        if peak is not None:
            self._peaks[stage] = max(peak, self._peaks.get(stage, 0.0))

    def by_stage(self) -> dict[str, float]:
        """What was measured since the last time."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def take(self) -> dict[str, float]:
        """As metrics: `perf/memory_gb/STAGE`, and `perf/memory_gb` for the largest."""
        return as_metrics([self.by_stage()])


def as_metrics(workers: Sequence[Mapping[str, float]], name: str = "perf/memory_gb") -> dict[str, float]:
    """By stage the fullest of these workers, and the largest of all."""
    stages = dict.fromkeys(stage for peaks in workers for stage in peaks)
    found = {f"{name}/{stage}": round(max(peaks.get(stage, 0.0) for peaks in workers), 6) for stage in stages}
    return {name: max(found.values()), **found} if found else {}


def resident_peak() -> float | None:
    """The most that this process held resident since the mark was reset; None where the kernel does not tell."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e9
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def begin_trace() -> torch.profiler.profile:
    """From now on this thread's operations and the GPU's kernels are recorded."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    return profiler


def end_trace(profiler: torch.profiler.profile, path: Path | None) -> None:
    """Write the recorded trace, or drop it without a path; the file appears when it is complete."""
    profiler.stop()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # a rank may be on another machine
    partial = path.with_name(f".{path.name}")  # its suffix decides that it is compressed
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
