"""Profilers by their names: methods stay as they are. The time of every stage is in a run's metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl._config import BaseConfig


class ProfilerConfig(BaseConfig):
    """Settings of a profiler: which ranks it watches."""

    _defaults = {  # noqa: RUF012
        "tool": None,
        "enable": False,
        "all_ranks": False,
        "ranks": [],
        "save_path": None,
        "tool_config": None,
        "global_tool_config": None,
    }

    def union(self, other: ProfilerConfig) -> ProfilerConfig:
        """What one of the two watches."""
        return self._joined(other, self.enable or other.enable, self.all_ranks or other.all_ranks, set.union)

    def intersect(self, other: ProfilerConfig) -> ProfilerConfig:
        """What both watch."""
        return self._joined(other, self.enable and other.enable, self.all_ranks and other.all_ranks, set.intersection)

    def _joined(self, other: ProfilerConfig, enable: bool, all_ranks: bool, join: Any) -> ProfilerConfig:
        assert self.tool == other.tool, f"Cannot join profilers of two tools: {self.tool} and {other.tool}"
        rest = {name: self[name] for name in self if name not in ("enable", "all_ranks", "ranks")}
        ranks = sorted(join(set(self.ranks or []), other.ranks or []))
        return ProfilerConfig(**{**rest, "enable": enable, "all_ranks": all_ranks, "ranks": ranks})


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
