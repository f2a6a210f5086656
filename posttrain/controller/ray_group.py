"""Calls to workers in Ray actors: futures of their answers, and groups that call one role on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from posttrain.controller.group import Future, WorkerGroup
from posttrain.controller.ray_ranks import RankWatch
from posttrain.controller.wire import pack


class RayFuture(Future[Any]):
    """The results of ranks, joined. The first error of any rank is the call's, though others may wait for ever."""

    def __init__(self, refs: list[Any], join: Callable[[list[Any]], Any], watch: RankWatch) -> None:
        self.refs, self.join, self._watch = refs, join, watch
        self.waiting = list(refs)  # of ranks that have not answered, as far as was looked
        self._found: dict[Any, Any] = {}
        self._error: Exception | None = None
        self._value: Any = None
        self._joined = False

    def done(self) -> bool:
        while not self._is_over():
            # One at a time: an error of the first that is ready must not wait for the others, which may hang.
            ready, self.waiting = ray.wait(self.waiting, num_returns=1, timeout=0)
            if not ready:
                break
            self._take(ready[0])
        return self._is_over()

    def result(self) -> Any:
        while not self._is_over():
            ready, self.waiting = self._watch.wait(self.waiting)
            self._take(ready[0])
        if self._error is not None:
            raise self._error
        if not self._joined:  # joining may be expensive or consume its parts: it is done once, by who needs the result
            self._value, self._joined = self.join([self._found.pop(ref) for ref in self.refs]), True
        return self._value

    def _is_over(self) -> bool:
        return self._error is not None or not self.waiting

    def _take(self, ref: Any) -> None:
        try:
            self._found[ref] = self._watch.fetch(ref)
        except Exception as error:
            self._error = error


class RayWorkerGroup(WorkerGroup):
    """One role on every rank."""

    overlaps = True

    def __init__(self, role: str, worker: type, config: Any, hosts: list[Any], watch: RankWatch) -> None:
        self.role, self.worker_class, self.config, self.hosts, self.watch = role, worker, config, hosts, watch
        self.world_size = len(hosts)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self._future(self._start(rank, name, arguments))

    def _start(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return self.hosts[rank].call.remote(self.role, name, *pack(arguments))

    def _send_answer(self, rank: int, name: str, answer: Future[Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Ray's store holds the answer once per machine; a rank there reads it from the store."""
        assert isinstance(answer, RayFuture) and len(answer.refs) == 1
        return self._future(self.hosts[rank].take.remote(self.role, name, answer.refs[0], *pack(arguments)))

    def _future(self, ref: Any) -> RayFuture:
        return RayFuture([ref], lambda results: results[0], self.watch)

    # Parts are flattened into one list of references, so that a joined call of teams waits for all ranks at once and
    # sees the first error of any, whichever team it is in.
    def _joined(self, parts: Sequence[Any], join: Callable[[list[Any]], Any]) -> Future[Any]:
        def joined(results: list[Any]) -> Any:
            left = iter(results)
            return join([part.join([next(left) for _ in part.refs]) for part in parts])

        return RayFuture([ref for part in parts for ref in part.refs], joined, self.watch)

    def wait_any(self, futures: Sequence[Any]) -> None:
        if futures and not any(future.done() for future in futures):
            self.watch.wait([ref for future in futures for ref in future.waiting])
