"""Calls to workers in Ray actors: futures of their answers, and groups that call one role on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from posttrain.controller.futures import Future
from posttrain.controller.group import WorkerGroup
from posttrain.controller.rank_host import Failure
from posttrain.controller.wire import pack, unpack
from posttrain.controller.worker_died import death_of


class RayFuture(Future):
    """The results of ranks, joined. The first error of any rank is the call's, though others may wait for ever."""

    def __init__(self, refs: list[Any], join: Callable[[list[Any]], Any], role: str = "") -> None:
        self.refs, self.join, self._role = refs, join, role
        self.waiting = list(refs)
        """Of ranks that have not answered, as far as was looked."""
        self._found: dict[Any, Any] = {}
        self._error: Exception | None = None
        self._value: Any = None
        self._joined = False

    def done(self) -> bool:
        while not self._is_over() and self._look(timeout=0):
            pass
        return self._is_over()

    def result(self) -> Any:
        while not self._is_over():
            self._look()
        if self._error is not None:
            raise self._error
        if not self._joined:
            self._value, self._joined = self.join([self._found.pop(ref) for ref in self.refs]), True
        return self._value

    def _is_over(self) -> bool:
        return self._error is not None or not self.waiting

    def _look(self, timeout: float | None = None) -> bool:
        """Take the next answer; False if none came in time."""
        ready, self.waiting = ray.wait(self.waiting, num_returns=1, timeout=timeout)
        for ref in ready:
            try:
                self._found[ref] = fetched(ref, self._role)
            except Exception as error:
                self._error = error
        return bool(ready)


def fetched(ref: Any, role: str = "") -> Any:
    """What a rank answered, private to this process; its error is raised. Who died is told with its role."""
    try:
        value = unpack(ray.get(ref))
    except RayActorError as error:
        raise death_of(error, role) from error
    if isinstance(value, Failure):
        raise value.as_raised()
    return value


class RayWorkerGroup(WorkerGroup):
    """One role on every rank."""

    overlaps = True

    def __init__(self, role: str, worker: type, config: Any, hosts: list[Any]) -> None:
        self.role, self.worker_class, self.config, self.hosts = role, worker, config, hosts
        self.world_size = len(hosts)

    def _method(self, name: str) -> Any:
        return getattr(self.worker_class, name)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future:
        return self._future(self._start(rank, name, arguments))

    def _start(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return self.hosts[rank].call.remote(self.role, name, *pack(arguments))

    def _send_answer(self, rank: int, name: str, answer: Future, arguments: tuple[Any, ...]) -> Future:
        """Ray's store holds the answer once per machine; a rank there reads it from the store."""
        assert isinstance(answer, RayFuture) and len(answer.refs) == 1
        return self._future(self.hosts[rank].take.remote(self.role, name, answer.refs[0], *pack(arguments)))

    def _future(self, ref: Any) -> RayFuture:
        return RayFuture([ref], lambda results: results[0], self.role)

    def _joined(self, parts: Sequence[Any], join: Callable[[list[Any]], Any]) -> Future:
        def joined(results: list[Any]) -> Any:
            left = iter(results)
            return join([part.join([next(left) for _ in part.refs]) for part in parts])

        return RayFuture([ref for part in parts for ref in part.refs], joined, self.role)

    def wait_any(self, futures: Sequence[Any]) -> None:
        if futures and not any(future.done() for future in futures):
            ray.wait([ref for future in futures for ref in future.waiting], num_returns=1)
