"""Times of stages and the memory of the device."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of a `with` to `timing_raw[name]`."""
    began = time.perf_counter()
    yield
    timing_raw[name] = timing_raw.get(name, 0.0) + time.perf_counter() - began


@contextlib.contextmanager
def marked_timer(
    name: str, timing_raw: dict[str, float], color: str | None = None, domain: str | None = None, category: Any = None
) -> Iterator[None]:
    """As `simple_timer`; on a CUDA device the stage is also marked for profilers."""
    import torch

    with torch.profiler.record_function(name), simple_timer(name, timing_raw):
        yield


def reduce_timing(timing_raw: dict[str, float], reduce_op: Any = None) -> dict[str, float]:
    """The mean over ranks where there are several."""
    import torch
    from torch import distributed as dist

    if not dist.is_initialized():
        return timing_raw
    names = sorted(timing_raw)
    times = torch.tensor([timing_raw[name] for name in names])
    dist.all_reduce(times, op=reduce_op or dist.ReduceOp.SUM)
    if reduce_op is None:
        times /= dist.get_world_size()
    return dict(zip(names, times.tolist(), strict=True))


def log_gpu_memory_usage(head: str, logger: Any = None, level: int = logging.DEBUG, rank: int = 0) -> None:
    """One line with the device's memory, to the logger or to the console."""
    import torch

    if not torch.cuda.is_available():
        return
    allocated, reserved = (value / 1024**3 for value in (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    free, total = (value / 1024**3 for value in torch.cuda.mem_get_info())
    used = f"device memory used/total (GB): {total - free:.2f}/{total:.2f}"
    line = f"{head}, memory allocated (GB): {allocated:.2f}, memory reserved (GB): {reserved:.2f}, {used}"
    print(line) if logger is None else logger.log(level, line)


class GPUMemoryLogger:
    """Decorator: the device's memory before and after a call."""

    def __init__(self, role: str, logger: Any = None, level: int = logging.DEBUG, log_only_rank_0: bool = True) -> None:
        self.role, self.logger, self.level = role, logger, level

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            log_gpu_memory_usage(f"Before {function.__name__} ({self.role})", self.logger, self.level)
            result = function(*args, **kwargs)
            log_gpu_memory_usage(f"After {function.__name__} ({self.role})", self.logger, self.level)
            return result

        return logged


def log_print(ctn: Any) -> None:
    print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {ctn}")
