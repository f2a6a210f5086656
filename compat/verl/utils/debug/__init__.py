"""verl's older address of `verl.utils.profiler`."""

from verl.utils.profiler import (
    DistProfiler,
    GPUMemoryLogger,
    ProfilerConfig,
    log_gpu_memory_usage,
    log_print,
    mark_annotate,
    marked_timer,
    reduce_timing,
    simple_timer,
)

__all__ = [
    "DistProfiler",
    "GPUMemoryLogger",
    "ProfilerConfig",
    "log_gpu_memory_usage",
    "log_print",
    "mark_annotate",
    "marked_timer",
    "reduce_timing",
    "simple_timer",
]
