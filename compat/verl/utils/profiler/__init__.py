"""Times of stages. (Profiles of a run: posttrain's metrics have the time of every stage.)"""

from verl.utils.profiler.performance import (
    GPUMemoryLogger,
    log_gpu_memory_usage,
    log_print,
    marked_timer,
    reduce_timing,
    simple_timer,
)
from verl.utils.profiler.profile import DistProfiler, DistProfilerExtension, ProfilerConfig, mark_annotate

__all__ = [
    "DistProfiler",
    "DistProfilerExtension",
    "GPUMemoryLogger",
    "ProfilerConfig",
    "log_gpu_memory_usage",
    "log_print",
    "mark_annotate",
    "marked_timer",
    "reduce_timing",
    "simple_timer",
]
