"""Workers in Ray actors: one process per rank that hosts every role; others beside them may host the rollout alone.

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
from posttrain.controller.pool import ROLLOUT, StagePeaks, Workers, as_metrics
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
        if not self._joined:  # joining may be expensive or consume its parts: it is done once, by who needs the result
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
    """One role on every rank."""

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
        if self.role == ROLLOUT and self.watch.replaces_rollout:
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
    `rollout` further processes only generate (disaggregated rollout). Each of these is a world of one rank, unless a
    `team` of several holds one engine. Ray has `placement_s` seconds to find room for all. A process that is stopped
    for longer than `stopped_s` seconds counts as lost, and so do all that neither answer nor compute for `hung_s`; the
    last output of one that died is written to `logs`.
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
        rollout: int = 0,
        team: int = 1,
        placement_s: float = 300.0,
        stopped_s: float = 300.0,
        hung_s: float = math.inf,
        logs: Path | None = None,
        shared: Path | None = None,
    ) -> None:
        self.watch = RankWatch(stopped_s, tell, logs, hung_s)
        self.world_size, self.prepare, self.machines, self.tell = ranks, prepare, machines, tell
        self.hosts, self.rollout_hosts = [], []
        self._device, self._placement_s = device, placement_s
        self._built: list[tuple[str, Any]] = []  # roles of the rollout workers, as they were made
        self.placement: Placement | None = None
        self.cluster, self._shared = (
            cluster or RayCluster(ranks + rollout, settings, machines, tell, shared),
            cluster is not None,
        )
        try:
            self._start(ranks, rollout, device, team, placement_s)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int, rollout: int, device: Any, team: int, placement_s: float) -> None:
        if not self._shared:
            self.cluster.start()
        each = ranks // self.machines
        self.placement = Placement(device.type, self.machines, each, rollout, team, placement_s, self.tell)
        homes, rooms = self.placement.training, self.placement.rollout
        self._rooms, seats = rooms, (*homes, *rooms)
        # All processes of a machine share its cores: too many threads in each would slow all of them down.
        self._crowd = crowd = Counter(seat.machine.id for seat in seats)
        self.hosts = [self._host(rank, home, crowd[home.machine.id], device) for rank, home in enumerate(homes)]
        # A rollout worker is a world of one rank: no collective can make it wait for another, or for training.
        known = rollout if team > 1 else 1
        self.rollout_hosts = [
            self._host(number, room, crowd[room.machine.id], device, known) for number, room in enumerate(rooms)
        ]
        pairs = zip(self._names(), self._all_hosts(), seats, strict=True)
        self.watch.begin([Rank(name, host, seat.machine) for name, host, seat in pairs])
        if len(crowd) > 1:  # different versions would show as other numbers, or as a collective that never ends
            there = self.watch.gather([host.programs.remote() for host in self._all_hosts()])
            check_same_programs(there, [seat.machine.address for seat in seats])
        # All ranks join at once: the rendezvous of torch.distributed returns when the last of them has come.
        joining = []
        for hosts, first in ((self.hosts, homes), (self.rollout_hosts, rooms)):
            address = self.watch.fetch(hosts[0].free_address.remote(first[0].machine.address)) if hosts else ""
            joining += [host.connect.remote(address, pack(self.prepare)) for host in hosts]
        self.watch.gather(joining)

    def _all_hosts(self) -> list[Any]:
        return [*self.hosts, *self.rollout_hosts]

    def _host(self, rank: int, seat: Seat, crowd: int, device: Any, ranks: int | None = None) -> Any:
        """The process of a rank, in its seat; `crowd` processes share that machine's cores. It is one of `ranks` (all
        that train)."""
        # No CPUs are taken of the seat: threads are set below, and a machine may have fewer cores than workers.
        resources = {"num_gpus": 1, "num_cpus": 0} if device.type == "cuda" else {"num_cpus": 0}
        # One call at a time: calls of a rank happen in the order in which the driver made them, as collectives need.
        actor = ray.remote(RankHost).options(max_concurrency=1, scheduling_strategy=seat.strategy, **resources)
        threads, paths = max(1, seat.machine.cores // crowd), [folder for folder in sys.path if folder]
        return actor.remote(rank, ranks or self.world_size, str(device), threads, os.getcwd(), paths)

    @property
    def rollout_size(self) -> int:
        return len(self.rollout_hosts)

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        parcel = pack((worker, arguments, named))
        config = next((value for value in arguments if hasattr(value, "trainer")), None)
        hosts = self.rollout_hosts if role == ROLLOUT else self.hosts
        if role == ROLLOUT:
            self._built.append((role, parcel))
        self.watch.gather([host.build.remote(role, parcel) for host in hosts])
        return RayWorkerGroup(role, worker, config, hosts, self.watch)

    def replace_rollout_workers(self) -> bool:
        if not self.rollout_hosts:
            return False
        # From now on responses that a worker has written outlive it, too: they are being scored, or trained on.
        self.watch.replaces_rollout = True
        return True

    def number_of_lost_rollout(self, death: WorkerDied) -> int:
        number = int(death.worker.split()[-1]) if self.watch.can_be_replaced(death) else None
        if number is None or not self._is_alive(self._rooms[number].machine):
            raise death
        return number

    def _is_alive(self, machine: Machine) -> bool:
        return any(node["Alive"] and node["NodeID"] == machine.id for node in ray.nodes())

    def replace(self, number: int) -> None:
        seat = self._rooms[number]
        ray.kill(self.rollout_hosts[number])
        host = self._host(number, seat, self._crowd[seat.machine.id], self._device, 1)
        self.watch.replace(Rank(f"{ROLLOUT} {number}", host, seat.machine), self._placement_s)
        self.rollout_hosts[number] = host  # the groups of its roles hold this very list
        self.watch.fetch(host.connect.remote("", pack(self.prepare)))
        for role, parcel in self._built:
            self.watch.fetch(host.build.remote(role, parcel))

    def _names(self) -> list[str]:
        ranks = [f"rank {rank}" for rank in range(len(self.hosts))]
        return [*ranks, *(f"{ROLLOUT} {number}" for number in range(len(self.rollout_hosts)))]

    def spans(self) -> list[list[Any]]:
        asked = [host.take_spans.remote() for host in self._all_hosts()]
        found = self.watch.gather_from_others(asked, self.watch.plain, [])
        return [[*span, who] for who, own in zip(self._names(), found, strict=True) for span in own]

    def check(self) -> None:
        self.watch.gather_from_others([host.identity.remote() for host in self._all_hosts()], self.watch.fetch, None)

    def peaks(self) -> StagePeaks:
        return RayPeaks(self.hosts, self.rollout_hosts, self.watch)

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
        count = self.world_size + self.rollout_size
        return f"{count} processes{where} in Ray {ray.__version__}, {self.cluster.words()}"

    def places(self, generating: int = 0) -> list[str]:
        rollout = self.rollout_hosts or self.hosts[:generating]
        if not rollout:
            return []
        pools = {"Training": self.hosts, "Rollout": rollout}
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
    """Of `hosts`, and of those that only generate under a name of their own. Nobody is waited for at the bounds of a
    stage: a worker hears of them between the calls that it is asked for."""

    def __init__(self, hosts: Sequence[Any], rollout_hosts: Sequence[Any], watch: RankWatch) -> None:
        self.hosts, self.rollout_hosts, self.watch = hosts, rollout_hosts, watch

    def begin(self) -> None:
        for host in (*self.hosts, *self.rollout_hosts):
            host.begin_stage.remote()

    def end(self, stage: str) -> None:
        for host in (*self.hosts, *self.rollout_hosts):
            host.end_stage.remote(stage)

    def take(self) -> dict[str, float]:
        asked = [[host.take_peaks.remote() for host in pool] for pool in (self.hosts, self.rollout_hosts)]
        training, rollout = (self.watch.gather_from_others(refs, self.watch.fetch, {}) for refs in asked)
        return as_metrics(training) | as_metrics(rollout, "perf/rollout_memory_gb")
