"""Cores, memory and GPUs of this machine that this process may use, without torch.

A machine's own number of cores is more than that under `taskset` or a batch system, which bind a process to some of
them, and in a container, whose quota is counted in cores.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")  # what a container sees here are its own limits


def usable() -> int:
    """Cores that this process may run on at once, at least 1."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return bound if quota is None else max(1, min(bound, int(quota)))


def _quota() -> float | None:
    """Cores that the container's quota comes to; None where there is none."""
    both = _words("cpu.max") or [*_words("cpu/cpu.cfs_quota_us"), *_words("cpu/cpu.cfs_period_us")]
    try:
        time, period = (int(word) for word in both)
    except ValueError:  # "max 100000", or no such file
        return None
    return time / period if time > 0 and period > 0 else None


def _words(name: str) -> list[str]:
    try:
        return (CGROUPS / name).read_text().split()
    except OSError:
        return []


def machine_memory() -> int:
    """Bytes of memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that this machine, or this container, can still give to processes."""
    free = machine_memory()
    with suppress(OSError, StopIteration, ValueError, IndexError):
        line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    with suppress(ValueError, IndexError):  # "max", or no such file
        limit, held = int(_words("memory.max")[0]), int(_words("memory.current")[0])
        stat = _words("memory.stat")
        # Pages of files count as held, but are given up when a process needs them.
        files = int(stat[stat.index("file") + 1]) if "file" in stat else 0
        free = min(free, limit - held + files)
    return max(0, free)


def gpus_present() -> int:
    """GPUs that a CUDA or ROCm build of torch would see, as far as files and variables tell."""
    nvidia = [file for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdigit()]
    count = len(nvidia)
    if count == 0 and Path("/dev/kfd").exists():
        count = len(list(Path("/dev/dri").glob("renderD*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    if visible is not None:
        named = [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
        count = min(count, len(named))
    return count
