"""A worker group of one, in this process: calls go straight to the worker, nothing is copied."""

from __future__ import annotations

from typing import Any


class LocalWorkerGroup:
    """Looks to the trainer like any worker group; only methods marked with `register` can be called."""

    world_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.worker, name)
        if not hasattr(method, "dispatch"):
            raise AttributeError(f"{type(self.worker).__name__}.{name} is not marked for dispatch")
        return method
