"""Workers in Ray actors: one process per rank that hosts every role; others beside them may host one role alone.

`RayFuture` is a call under way, `RayWorkerGroup` calls one role on every rank, `RayWorkers` starts them all.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from posttrain.controller.group import Future, WorkerGroup
from posttrain.controller.incidents import WorkerDied
from posttrain.controller.pool import ROLLOUT, RolePool, StagePeaks, Workers, as_metrics, role_of
from posttrain.controller.rank_host import RankHost, pack, size_of
from posttrain.controller.ray_cluster import Machine, RayCluster, check_same_programs
from posttrain.controller.ray_placement import Placement, Seat
from posttrain.controller.ray_ranks import Rank, RankWatch

SHARED_BYTES = 100_000  # Ray itself copies smaller arguments into the call


class RayFuture(Future[Any]):
    """The results of ranks, joined. The first error of any rank is the call's, though others may wait for ever."""

    def __init__(
        self, refs: list[Any], join: Callable[[list[Any]], Any], watch: RankWatch, beside: Mapping[Any, Any]
    ) -> None:
        """`beside` are the second results of calls that have one, by their first."""
        self.refs, self.join, self._watch, self.beside = refs, join, watch, beside
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
        if not self._joined:  # joining may be expensive or consume its parts, so it is done once, and late
            self._value, self._joined = self.join([self._found.pop(ref) for ref in self.refs]), True
        return self._value

    def _is_over(self) -> bool:
        return self._error is not None or not self.waiting

    def _take(self, ref: Any) -> None:
        try:
            self._found[ref] = self._watch.fetch(ref, self.beside.get(ref))
        except Exception as error:
            self._error = error


class RayWorkerGroup(WorkerGroup):
    """One role in every process of a pool."""

    overlaps = True

    def __init__(self, role: str, worker: type, config: Any, hosts: list[Any], watch: RankWatch) -> None:
        self.role, self.worker_class, self.config, self.hosts, self.watch = role, worker, config, hosts, watch
        self.world_size = len(hosts)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self._send_same([rank], name, arguments)[0]

    def _send_same(self, ranks: Sequence[int], name: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        parcel: Any = pack(arguments)
        for rank in ranks:
            self.watch.note_call(self.hosts[rank], f"{self.role}.{name}")
        if len(ranks) > 1 and size_of(parcel) > SHARED_BYTES:
            parcel = ray.put(parcel)  # one object, which Ray's store holds once per machine
        if self.role in self.watch.replaced_alone:
            calls = [self.hosts[rank].call_and_give.options(num_returns=2) for rank in ranks]
            return [self._future(*call.remote(self.role, name, parcel)) for call in calls]
        return [self._future(self.hosts[rank].call.remote(self.role, name, parcel)) for rank in ranks]

    def _send_answer(self, rank: int, name: str, answer: Future[Any], arguments: tuple[Any, ...]) -> Future[Any]:
        # Ray's store holds the answer once per machine; a rank there reads it from the store.
        assert isinstance(answer, RayFuture) and len(answer.refs) == 1
        self.watch.note_call(self.hosts[rank], f"{self.role}.{name}")
        return self._future(self.hosts[rank].take.remote(self.role, name, answer.refs[0], pack(arguments)))

    def _future(self, ref: Any, second: Any = None) -> RayFuture:
        return RayFuture([ref], lambda results: results[0], self.watch, {} if second is None else {ref: second})

    # Parts are flattened into one list of references, so that a joined call of teams waits for all ranks at once and
    # sees the first error of any, whichever team it is in.
    def _joined(self, parts: Sequence[Any], join: Callable[[list[Any]], Any]) -> Future[Any]:
        def joined(results: list[Any]) -> Any:
            left = iter(results)
            return join([part.join([next(left) for _ in part.refs]) for part in parts])

        beside = {ref: second for part in parts for ref, second in part.beside.items()}
        return RayFuture([ref for part in parts for ref in part.refs], joined, self.watch, beside)

    def wait_any(self, futures: Sequence[Any]) -> None:
        if futures and not any(future.done() for future in futures):
            self.watch.wait([ref for future in futures for ref in future.waiting])


class RayWorkers(Workers):
    """`ranks` processes, each with a GPU or a share of its machine's cores, equally many on each machine.

    They live in a Ray that is started for them, or in `cluster`, which they leave running. Each calls `prepare` first.
    `pools` are further processes for one role each. Ray has `placement_s` seconds to find room for all. A process that
    is stopped for longer than `stopped_s` seconds counts as lost, and so do all that neither answer nor compute for
    `hung_s`; the last output of one that died is written to `logs`.
    """

    in_ray = True

    def __init__(
        self,
        ranks: int,
        device: Any,
        cluster: RayCluster | None = None,
        prepare: Callable[[], None] | None = None,
        machines: int = 1,
        tell: Callable[[str], None] = print,
        settings: Mapping[str, Any] | None = None,
        pools: Sequence[RolePool] = (),
        placement_s: float = 300.0,
        stopped_s: float = 300.0,
        hung_s: float = math.inf,
        logs: Path | None = None,
        shared: Path | None = None,
    ) -> None:
        self.watch = RankWatch(stopped_s, tell, logs, hung_s)
        self.world_size, self.prepare, self.machines, self.tell = ranks, prepare, machines, tell
        self.hosts: list[Any] = []
        self.own_hosts: dict[str, list[Any]] = {}  # by role
        self._pools = {pool.role: pool for pool in pools}
        self._device, self._placement_s = device, placement_s
        self._built: dict[str, Any] = {}  # roles with processes of their own, as they were made
        self.placement: Placement | None = None
        count = ranks + sum(pool.workers for pool in pools)
        self.cluster, self._shared = (
            cluster or RayCluster(count, settings, machines, tell, shared),
            cluster is not None,
        )
        try:
            self._start(ranks, device, placement_s)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int, device: Any, placement_s: float) -> None:
        if not self._shared:
            self.cluster.start()
        each = ranks // self.machines
        pools = tuple(self._pools.values())
        self.placement = Placement(device.type, self.machines, each, pools, placement_s, self.tell)
        homes, self._seats = self.placement.training, self.placement.own
        seats = [*homes, *(seat for own in self._seats.values() for seat in own)]
        # All processes of a machine share its cores: too many threads in each would slow all of them down.
        self._crowd = crowd = Counter(seat.machine.id for seat in seats)
        self.hosts = [self._host(rank, home, crowd[home.machine.id], device) for rank, home in enumerate(homes)]
        for pool in pools:
            # Alone, a worker is a world of one rank: no collective can make it wait for another, or for training.
            known, own = pool.workers if pool.together else 1, self._seats[pool.role]
            self.own_hosts[pool.role] = [
                self._host(number, seat, crowd[seat.machine.id], device, known) for number, seat in enumerate(own)
            ]
        pairs = zip(self._names(), self._all_hosts(), seats, strict=True)
        self.watch.begin([Rank(name, host, seat.machine) for name, host, seat in pairs])
        if len(crowd) > 1:  # different versions would show as other numbers, or as a collective that never ends
            there = self.watch.gather([host.programs.remote() for host in self._all_hosts()])
            check_same_programs(there, [seat.machine.address for seat in seats])
        # All ranks join at once: the rendezvous of torch.distributed returns when the last of them has come.
        joining = []
        worlds = [(self.hosts, homes), *((hosts, self._seats[role]) for role, hosts in self.own_hosts.items())]
        for hosts, first in worlds:
            joining += self._connect(hosts, first[0])
        self.watch.gather(joining)

    def _connect(self, hosts: Sequence[Any], first: Seat) -> list[Any]:
        """Have these processes join each other, where the first of them is found in its seat."""
        address = self.watch.fetch(hosts[0].free_address.remote(first.machine.address))
        return [host.connect.remote(address, pack(self.prepare)) for host in hosts]

    def _all_hosts(self) -> list[Any]:
        return [*self.hosts, *(host for hosts in self.own_hosts.values() for host in hosts)]

    def _host(self, rank: int, seat: Seat, crowd: int, device: Any, ranks: int | None = None) -> Any:
        """The process of a rank, in its seat; `crowd` processes share that machine's cores. It is one of `ranks` (all
        that train)."""
        # No CPUs are taken of the seat: threads are set below, and a machine may have fewer cores than workers.
        resources = {"num_gpus": 1, "num_cpus": 0} if device.type == "cuda" else {"num_cpus": 0}
        # One call at a time: calls of a rank happen in the order in which the driver made them, as collectives need.
        actor = ray.remote(RankHost).options(max_concurrency=1, scheduling_strategy=seat.strategy, **resources)
        threads, paths = max(1, seat.machine.cores // crowd), [folder for folder in sys.path if folder]
        return actor.remote(rank, ranks or self.world_size, str(device), threads, os.getcwd(), paths)

    def own_size(self, role: str) -> int:
        return len(self.own_hosts.get(role, ()))

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        parcel = pack((worker, arguments, named))
        config = next((value for value in arguments if hasattr(value, "trainer")), None)
        hosts = self.own_hosts.get(role, self.hosts)
        if role in self.own_hosts:
            self._built[role] = parcel
        self.watch.gather([host.build.remote(role, parcel) for host in hosts])
        return RayWorkerGroup(role, worker, config, hosts, self.watch)

    def replace_alone(self, role: str) -> bool:
        if role not in self.own_hosts:
            return False
        # From now on what a worker has made outlives it, too: responses are being scored, or trained on.
        self.watch.replaced_alone.add(role)
        return True

    def number_of_lost(self, role: str, death: WorkerDied) -> int:
        if not self.watch.can_be_replaced(death) or role_of(death.worker) != role:
            raise death
        number = int(death.worker.split()[-1])
        if not all(self._is_alive(self._seats[role][own].machine) for own in self._world_of(role, number)):
            raise death
        return number

    def _world_of(self, role: str, number: int) -> Sequence[int]:
        """The workers of the role that meet this one in collectives, with itself."""
        pool = self._pools[role]
        return range(pool.workers) if pool.together else [number]

    def _is_alive(self, machine: Machine) -> bool:
        return any(node["Alive"] and node["NodeID"] == machine.id for node in ray.nodes())

    def replace(self, role: str, number: int) -> None:
        world, own, seats = self._world_of(role, number), self.own_hosts[role], self._seats[role]
        for one in world:
            ray.kill(own[one])
        hosts = [
            self._host(one, seats[one], self._crowd[seats[one].machine.id], self._device, len(world)) for one in world
        ]
        ranks = [Rank(f"{role} {one}", host, seats[one].machine) for one, host in zip(world, hosts, strict=True)]
        self.watch.replace(ranks, self._placement_s)
        for one, host in zip(world, hosts, strict=True):
            own[one] = host  # the role's group holds this very list
        self.watch.gather(self._connect(hosts, seats[world[0]]))
        self.watch.gather([host.build.remote(role, self._built[role]) for host in hosts])

    def _names(self) -> list[str]:
        ranks = [f"rank {rank}" for rank in range(len(self.hosts))]
        return [*ranks, *(f"{role} {number}" for role, own in self.own_hosts.items() for number in range(len(own)))]

    def spans(self) -> list[list[Any]]:
        asked = [host.take_spans.remote() for host in self._all_hosts()]
        found = self.watch.gather_from_others(asked, self.watch.plain, [])
        return [[*span, who] for who, own in zip(self._names(), found, strict=True) for span in own]

    def check(self) -> None:
        self.watch.gather_from_others([host.identity.remote() for host in self._all_hosts()], self.watch.fetch, None)

    def peaks(self) -> StagePeaks:
        return RayPeaks(self.hosts, self.own_hosts, self.watch)

    def printed(self) -> Iterator[tuple[str, list[str], list[str] | None]]:
        own, lost = ray.get_runtime_context().get_node_id(), set()
        for rank in self.watch.ranks:
            machine, files = rank.machine.id, rank.identity.files if rank.identity else []
            if machine == own:
                yield rank.who, files, None
            elif files and machine not in lost:
                try:
                    yield rank.who, files, self.watch.read_there(machine, files)
                except (RayError, KeyError):  # a machine that does not answer is asked once
                    lost.add(machine)

    def gpu(self) -> tuple[str, int, bool] | None:
        return self.watch.fetch(self.hosts[0].gpu.remote())

    @contextmanager
    def traced(self, stem: Path) -> Iterator[None]:
        self.watch.gather_from_others([host.begin_trace.remote() for host in self._all_hosts()], self.watch.plain, None)
        whole = False
        try:
            yield
            whole = True
        finally:
            names = [name.replace(" ", "_") for name in self._names()]
            paths = [f"{stem}.{name}.json.gz" if whole else None for name in names]
            ends = [host.end_trace.remote(path) for host, path in zip(self._all_hosts(), paths, strict=True)]
            self.watch.gather_from_others(ends, self.watch.fetch, None)

    def words(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{len(self._all_hosts())} processes{where} in Ray {ray.__version__}, {self.cluster.words()}"

    def places(self, generating: int = 0) -> list[str]:
        own = dict(self.own_hosts)
        if generating:
            own = {ROLLOUT: self.hosts[:generating], **own}
        if not own:
            return []
        pools = {"Training": self.hosts, **{role.replace("_", " ").capitalize(): hosts for role, hosts in own.items()}}
        return [
            f"{name}: {places_words(self.watch.gather([host.place.remote() for host in hosts]))}."
            for name, hosts in pools.items()
        ]

    def close(self) -> None:
        if self._shared or self.cluster.was_there:
            for host in self._all_hosts():
                ray.kill(host)
            if self.placement is not None:
                self.placement.close()
            self.watch.end()
        if not self._shared:
            self.cluster.stop()


# (the machine's name, the process's own GPUs there, its id, its threads), as `RankHost.place` tells.
Place = tuple[str, list[int], int, int]


def places_words(places: Sequence[Place]) -> str:
    """`GPUs 4, 5 of node-1` or, without GPUs, `processes 311, 312 of node-1, a core each`."""
    machines: dict[str, list[Place]] = {}
    for place in places:
        machines.setdefault(place[0], []).append(place)
    return "; ".join(f"{_of_one(own)} of {machine}{_cores(own)}" for machine, own in machines.items())


def _of_one(places: Sequence[Place]) -> str:
    gpus = [gpu for _, own, _, _ in places for gpu in own]
    kind, numbers = ("GPU", sorted(gpus)) if gpus else ("process", [process for _, _, process, _ in places])
    plural = {"GPU": "GPUs", "process": "processes"}[kind] if len(numbers) > 1 else kind
    return f"{plural} {', '.join(map(str, numbers))}"


def _cores(places: Sequence[Place]) -> str:
    if any(gpus for _, gpus, _, _ in places):
        return ""
    threads = places[0][3]
    cores = "a core" if threads == 1 else f"{threads} cores"
    return f", {cores}{' each' if len(places) > 1 else ''}"


class RayPeaks(StagePeaks):
    """Of `hosts`, and of those that have one role alone under its name. The bounds of a stage are not barriers: a
    worker gets them between its calls."""

    def __init__(self, hosts: Sequence[Any], own: Mapping[str, Sequence[Any]], watch: RankWatch) -> None:
        self.watch = watch
        self._pools = {"perf/memory_gb": hosts, **{f"perf/{role}_memory_gb": pool for role, pool in own.items()}}

    def begin(self) -> None:
        for pool in self._pools.values():
            for host in pool:
                host.begin_stage.remote()

    def end(self, stage: str) -> None:
        for pool in self._pools.values():
            for host in pool:
                host.end_stage.remote(stage)

    def take(self) -> dict[str, float]:
        asked = {name: [host.take_peaks.remote() for host in pool] for name, pool in self._pools.items()}
        found = {name: self.watch.gather_from_others(refs, self.watch.fetch, {}) for name, refs in asked.items()}
        return {name: value for own, peaks in found.items() for name, value in as_metrics(peaks, own).items()}
