"""Workers in Ray actors: one process per rank that hosts every role, and groups that call them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.controller.alike import check_alike
from posttrain.controller.futures import Future
from posttrain.controller.group import WorkerGroup
from posttrain.controller.pool import Workers
from posttrain.controller.rank_host import Failure, RankHost
from posttrain.controller.ray_cluster import RayCluster
from posttrain.controller.ray_machines import Machine, machines_for
from posttrain.controller.wire import pack, unpack
from posttrain.controller.worker_died import death_of


class RayFuture(Future):
    """The results of ranks, joined. The first error of any rank is the call's, though others may wait for ever."""

    def __init__(self, refs: list[Any], join: Callable[[list[Any]], Any]) -> None:
        self.refs, self._join = refs, join
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
                found[ready[0]] = _fetched(ready[0])
            self._value, self._taken = self._join([found[ref] for ref in self.refs]), True
        return self._value


def _fetched(ref: Any) -> Any:
    try:
        value = unpack(ray.get(ref))
    except RayActorError as error:
        raise death_of(error) from error
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

    def _future(self, ref: Any) -> RayFuture:
        return RayFuture([ref], lambda results: results[0])

    def _joined(self, parts: Sequence[Any], join: Callable[[list[Any]], Any]) -> Future:
        return RayFuture([ref for part in parts for ref in part.refs], join)

    def wait_any(self, futures: Sequence[Any]) -> None:
        if futures:
            ray.wait([ref for future in futures for ref in future.refs], num_returns=1)


class RayWorkers(Workers):
    """`ranks` processes, each with its share of its machine's cores, or with a GPU of its own. They live in a Ray that
    is started for them, or in `cluster`, which they leave running; on the command's machine, or equally many on each of
    several. Each of them calls `prepare` first."""

    def __init__(
        self,
        ranks: int,
        device: Any,
        cluster: RayCluster | None = None,
        prepare: Callable[[], None] | None = None,
        machines: int = 1,
        tell: Callable[[str], None] = print,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.world_size, self.hosts, self.prepare, self.machines, self.tell = ranks, [], prepare, machines, tell
        self.cluster, self._shared = cluster or RayCluster(ranks, settings, machines, tell), cluster is not None
        try:
            self.hosts = self._start(ranks, device)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int, device: Any) -> list[Any]:
        if not self._shared:
            self.cluster.start()
        each = ranks // self.machines
        machines = machines_for(self.machines, each, device.type, self.tell, coming=self.cluster.is_head)
        hosts = [self._host(rank, machines[rank // each], each, device) for rank in range(ranks)]
        if self.machines > 1:
            there = [_fetched(ref) for ref in [host.programs.remote() for host in hosts]]
            check_alike(there, [machines[rank // each].address for rank in range(ranks)])
        address = _fetched(hosts[0].free_address.remote(machines[0].address))
        for ref in [host.connect.remote(address, *pack(self.prepare)) for host in hosts]:
            _fetched(ref)
        return hosts

    def _host(self, rank: int, machine: Machine, each: int, device: Any) -> Any:
        """The process of a rank, on its machine."""
        resources = {"num_gpus": 1, "num_cpus": 0} if device.type == "cuda" else {"num_cpus": 0}
        there = NodeAffinitySchedulingStrategy(machine.id, soft=False)
        actor = ray.remote(RankHost).options(max_concurrency=1, scheduling_strategy=there, **resources)
        threads, paths = max(1, machine.cores // each), [folder for folder in sys.path if folder]
        return actor.remote(rank, self.world_size, str(device), threads, os.getcwd(), paths)

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        parcel = pack((worker, arguments, named))
        config = next((value for value in arguments if hasattr(value, "trainer")), None)
        for ref in [host.build.remote(role, *parcel) for host in self.hosts]:
            _fetched(ref)
        return RayWorkerGroup(role, worker, config, self.hosts)

    def spans(self) -> list[list[Any]]:
        found = ray.get([host.take_spans.remote() for host in self.hosts])
        return [[*span, f"rank {rank}"] for rank, own in enumerate(found) for span in own]

    @contextmanager
    def traced(self, stem: Path) -> Iterator[None]:
        ray.get([host.begin_trace.remote() for host in self.hosts])
        whole = False
        try:
            yield
            whole = True
        finally:
            paths = [f"{stem}.rank_{rank}.json.gz" if whole else None for rank in range(self.world_size)]
            for ref in [host.end_trace.remote(path) for host, path in zip(self.hosts, paths, strict=True)]:
                _fetched(ref)

    def words(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.world_size} processes{where} in Ray {ray.__version__}, {self.cluster.words()}"

    def close(self) -> None:
        if self._shared or self.cluster.was_there:
            for host in self.hosts:
                ray.kill(host)
        if not self._shared:
            self.cluster.stop()
