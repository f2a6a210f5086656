"""What this process does between two moments, as a file of torch's profiler (Chrome's trace format, compressed)."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def begin_trace() -> torch.profiler.profile:
    """From now on this thread's operations and the GPU's kernels are recorded."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    return profiler


def end_trace(profiler: torch.profiler.profile, path: Path | None) -> None:
    """Write what was recorded, or forget it without a path; the file is there when it is whole."""
    profiler.stop()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # a rank may be on another machine
    partial = path.with_name(f".{path.name}")  # its suffix decides that it is compressed
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)
