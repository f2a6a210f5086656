"""A worker group of one, in this process: calls go straight to the worker, nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.controller.futures import Finished, Future
from posttrain.controller.group import WorkerGroup


class LocalWorkerGroup(WorkerGroup):
    """Looks to the trainer like any worker group; only methods marked with `register` can be called."""

    world_size = 1
    overlaps = False

    def __init__(self, worker: Any) -> None:
        self.worker, self.config = worker, worker.config

    def _method(self, name: str) -> Any:
        return getattr(self.worker, name)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future:
        return Finished(self._method(name), *arguments)

    def _joined(self, parts: list[Future], join: Callable[[list[Any]], Any]) -> Future:
        return Finished(lambda: join([part.result() for part in parts]))

    def wait_any(self, futures: Sequence[Future]) -> None:
        """Local calls are done when they were made."""
