"""Profilers by their names: methods stay as they are. The time of every stage is in a run's metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl._config import BaseConfig
from verl._missing import not_given

__getattr__ = not_given(__name__)


class ProfilerConfig(BaseConfig):
    """Settings of a profiler."""


def mark_annotate(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Decorator that changes nothing."""
    return lambda function: function


class DistProfiler:
    """`@DistProfiler.annotate(...)` marks a worker's method; nothing is traced."""

    def __init__(self, rank: int = 0, config: Any = None, **kwargs: Any) -> None:
        self.rank, self.config = rank, config

    def start(self, **kwargs: Any) -> None:
        """Nothing is traced."""

    def stop(self) -> None:
        """Nothing was traced."""

    annotate = staticmethod(mark_annotate)


class DistProfilerExtension:
    """A base of workers whose methods can be profiled."""

    def __init__(self, profiler: Any = None) -> None:
        self.profiler = profiler or DistProfiler()

    def start_profile(self, **kwargs: Any) -> None:
        self.profiler.start(**kwargs)

    def stop_profile(self) -> None:
        self.profiler.stop()
