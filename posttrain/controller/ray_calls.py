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
        self.refs, self._join, self._role = refs, join, role
        self._value: Any = None
        self._taken = False

    def done(self) -> bool:
        return self._taken or len(ray.wait(self.refs, num_returns=len(self.refs), timeout=0)[0]) == len(self.refs)

    def result(self) -> Any:
        if not self._taken:
            found: dict[Any, Any] = {}
            waiting = list(self.refs)
            while waiting:
                ready, waiting = ray.wait(waiting, num_returns=1)
                found[ready[0]] = fetched(ready[0], self._role)
            self._value, self._taken = self._join([found[ref] for ref in self.refs]), True
        return self._value


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
        return RayFuture([ref for part in parts for ref in part.refs], join, self.role)

    def wait_any(self, futures: Sequence[Any]) -> None:
        if futures:
            ray.wait([ref for future in futures for ref in future.refs], num_returns=1)
