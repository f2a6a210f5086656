"""What a group of workers is made of: so many processes per machine, and a class with its arguments."""

from __future__ import annotations

from typing import Any


class ResourcePool:
    """How many processes each machine gives."""

    def __init__(
        self, process_on_nodes: list[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ):
        self._store = list(process_on_nodes or [])
        self.max_colocate_count, self.n_gpus_per_node = max_colocate_count, n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def __call__(self) -> list[int]:
        return self._store

    store = property(__call__)

    def local_world_size_list(self) -> list[int]:
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A class with the arguments that it will be made with."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls, self.args, self.kwargs = cls, args, kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup:
    """The base of groups."""

    world_size: int
