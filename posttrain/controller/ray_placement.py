"""What a run takes of its Ray: reserved before any worker starts, and given back at the end.

A pool of workers is a placement group. `training` has a bundle per machine (`trainer.nnodes`, all different), that of a
role with workers of its own a bundle per worker, or per team of workers that hold one engine. Ray schedules a group as
a gang: it gets all of its bundles from what is free, or none. Groups belong to the driver's job. Ray removes them, and
kills the workers in them, when the driver has ended, however it ended.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain import cores
from posttrain.controller.incidents import NoRoom
from posttrain.controller.pool import RolePool
from posttrain.controller.ray_cluster import ITSELF, Machine

QUIET_S = 3.0  # of waiting before the user reads about it: a group that fits is there within a second
TIMEOUT = "trainer.placement_timeout_s"
_LONGEST_COMMAND = 80


@dataclass(frozen=True)
class Seat:
    """Where one worker goes: a bundle of a placement group, and the machine that Ray has put it on."""

    machine: Machine
    group: PlacementGroup
    bundle: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """For `options` of a Ray actor."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle)


@dataclass(frozen=True)
class Pool:
    """A placement group to be asked for: `count` bundles of `size` times `resource`, as `settings` say."""

    name: str
    resource: str
    count: int
    size: int
    strategy: str
    settings: str
    share: float = 1.0  # of the resource that one worker takes

    @property
    def bundle(self) -> dict[str, float]:
        return {self.resource: self.size * self.share}

    @property
    def by_machine(self) -> bool:
        """Whether every bundle is on a machine of its own."""
        return self.strategy.startswith("STRICT")

    def words(self, count: int | None = None) -> str:
        """`2 machines x 8 GPUs`, `3 x 1 GPU`."""
        count = self.count if count is None else count
        machines = (" machine" if count == 1 else " machines") if self.by_machine else ""
        return f"{count}{machines} x {counted(self.bundle[self.resource], self.resource)}"


def counted(amount: float, resource: str) -> str:
    """`1 GPU`, `2.5 CPUs`, `no GPU`."""
    return f"{amount:g} {resource}{'s' * (amount != 1)}" if amount else f"no {resource}"


def training_pool(device: str, machines: int, each: int, share: float = 1.0) -> Pool:
    # One machine: STRICT_PACK, the only strategy that Ray can give a preferred machine, which is the driver's own.
    strategy = "STRICT_SPREAD" if machines > 1 else "STRICT_PACK"
    settings = f"trainer.nnodes={machines}, trainer.n_gpus_per_node={each}"
    return Pool("training", _resource(device), machines, each, strategy, settings, share)


def role_pool(device: str, pool: RolePool, team: int, share: float = 1.0) -> Pool:
    # GPUs: on few machines, so that whole ones stay free for others. Cores: evenly, so that each worker has more.
    strategy = "PACK" if device == "cuda" else "SPREAD"
    settings = f"{pool.setting}={pool.workers}"
    return Pool(pool.title, _resource(device), pool.workers // team, team, strategy, settings, share)


def _resource(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


class Placement:
    """Reserves what the workers of a run need: `training` holds a seat for each that trains, `own` by role one for each
    worker of `pools`. `close` gives it back.

    Waits for at most `wait_s` seconds: machines may join, and other runs end. Then it raises NoRoom, which lists what
    was asked for, what is free and what has taken the rest.
    """

    def __init__(
        self,
        device: str,
        machines: int,
        each: int,
        pools: Sequence[RolePool] = (),
        wait_s: float = 300.0,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.groups: list[PlacementGroup] = []
        self._until, self._wait_s, self._tell = time.monotonic() + wait_s, wait_s, tell
        nodes, own = ray.nodes(), ray.get_runtime_context().get_node_id()
        others = sum(pool.workers for pool in pools)
        share = 1.0 if device == "cuda" else cpu_share(nodes, own, _held(), machines, each, others)
        largest = max((node["Resources"].get("GPU", 0) for node in nodes if node["Alive"]), default=0)
        try:
            # Ranks of one machine are neighbours: teams, FSDP groups and sequence-parallel groups talk over its bus.
            found = {"": self._seats(training_pool(device, machines, each, share), own)}
            try:
                for pool in pools:
                    # No machine holds a whole team, or cores are shared: its workers are placed one by one.
                    team = 1 if device != "cuda" or 0 < largest < pool.team else pool.team
                    found[pool.role] = self._seats(role_pool(device, pool, team, share), own)
            except NoRoom as full:
                full.machines = machines - 1  # one of those that train would have room for them
                raise
        except BaseException:
            self.close()
            raise
        seats = iter(with_addresses([seat for own_seats in found.values() for seat in own_seats], own))
        self.own = {role: [next(seats) for _ in own_seats] for role, own_seats in found.items()}
        self.training = self.own.pop("")

    def _seats(self, pool: Pool, own: str) -> list[Seat]:
        """A seat per worker of the pool, those on the driver's machine first."""
        target = own if pool.by_machine and pool.count == 1 else None
        name = f"posttrain {pool.name} {secrets.token_hex(4)}"  # Ray rejects a name that another group has
        group = placement_group([pool.bundle] * pool.count, pool.strategy, name, _soft_target_node_id=target)
        self.groups.append(group)
        self._wait_for(group, pool)
        node_of = placement_group_table(group)["bundles_to_node_id"]
        machines = {node["NodeID"]: machine_of(node) for node in ray.nodes()}
        order = sorted(node_of, key=lambda number: (node_of[number] != own, machines[node_of[number]].address, number))
        return [Seat(machines[node_of[number]], group, number) for number in order for _ in range(pool.size)]

    def _wait_for(self, group: PlacementGroup, pool: Pool) -> None:
        begun, told = time.monotonic(), False
        while not group.wait(1):
            now = time.monotonic()
            if now > self._until:
                facts = Resources.now(pool.resource)
                full = NoRoom(no_room(pool, self._wait_s, facts))
                full.machines = fitting(pool, facts)
                raise full
            if not told and now > begun + QUIET_S:
                told = True
                facts = Resources.now(pool.resource)
                self._tell(
                    f"Waiting for up to {self._wait_s:.0f} s ({TIMEOUT}) for room in Ray: the {pool.name} workers ask "
                    f"for {pool.words()}; free now: {facts.free_words()}."
                )

    def close(self) -> None:
        """Give everything back; workers that are still in it are killed."""
        while self.groups:
            with suppress(Exception):  # the Ray is gone, and with it the group
                remove_placement_group(self.groups.pop())


def machine_of(node: Mapping[str, Any]) -> Machine:
    """Of what Ray says of a node."""
    return Machine(node["NodeID"], node["NodeManagerAddress"], max(1, int(node["Resources"].get("CPU", 1))))


def with_addresses(seats: Sequence[Seat], own: str) -> list[Seat]:
    """The seats, with the loopback address where all are on one machine: then the workers are not reached by others."""
    if len({seat.machine.id for seat in seats}) > 1:
        return list(seats)

    def local(machine: Machine) -> Machine:
        # Ray may count other cores than those that the driver, and a process that Ray starts beside it, may use.
        return replace(machine, address=ITSELF, cores=cores.usable() if machine.id == own else machine.cores)

    return [replace(seat, machine=local(seat.machine)) for seat in seats]


def cpu_share(
    nodes: Sequence[Mapping[str, Any]], own: str, held: float, machines: int, each: int, others: int
) -> float:
    """CPUs of Ray that a worker on the CPU takes: 1, or 1/2, 1/3, ... where there are fewer cores than workers, as on a
    laptop. `held` are the driver's, where it is a Ray actor: its workers may use them."""
    present = [
        int(node["Resources"].get("CPU", 0)) - (held if node["NodeID"] == own else 0) for node in nodes if node["Alive"]
    ]
    present = sorted((count for count in present if count > 0), reverse=True)
    if not present:
        return 1.0  # all machines are still to come
    smallest = present[:machines][-1]
    total = sum(present) + smallest * max(
        0, machines - len(present)
    )  # those that are still to come are like the others
    parts = max(math.ceil(each / smallest), math.ceil((machines * each + others) / total), 1)
    return math.floor(10_000 / parts) / 10_000  # Ray counts in such steps


def _held() -> float:
    context = ray.get_runtime_context()  # Ray answers this in its own processes only
    return float(context.get_assigned_resources().get("CPU", 0)) if context.worker.mode == ray.WORKER_MODE else 0.0


@dataclass(frozen=True)
class Resources:
    """One resource of a Ray by machine: (address, free, in all); and sentences on what has taken the rest."""

    resource: str
    machines: list[tuple[str, float, float]]
    takers: list[str]

    @classmethod
    def now(cls, resource: str) -> Resources:
        """As Ray reports it."""
        from ray._private.state import available_resources_per_node

        nodes = [node for node in ray.nodes() if node["Alive"]]
        free = available_resources_per_node()
        found = []
        for node in nodes:
            total = node["Resources"].get(resource, 0)
            found.append((node["NodeManagerAddress"], free.get(node["NodeID"], {}).get(resource, 0.0), total))
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        return cls(resource, sorted(found), takers(resource, addresses, found))

    def free_words(self) -> str:
        """`10.0.0.2: 3 of 8 GPUs; 10.0.0.5: no GPU`."""
        return "; ".join(
            f"{address}: {free:g} of {counted(total, self.resource)}" if total else f"{address}: no {self.resource}"
            for address, free, total in self.machines
        )


def takers(resource: str, addresses: Mapping[str, str], machines: Sequence[tuple[str, float, float]]) -> list[str]:
    """What holds the resource: placement groups by their job, and what else is taken."""
    from ray._private.state import actors, jobs

    by_job: Counter[tuple[str, str]] = Counter()
    for identity, group in placement_group_table().items():
        for number, bundle in group["bundles"].items() if group["state"] == "CREATED" else ():
            address = addresses.get(group["bundles_to_node_id"][number])
            if address is not None and bundle.get(resource):
                by_job[address, str(identity)[-8:]] += bundle[resource]  # a group's id ends with that of its job
    known = {job["JobID"]: job for job in jobs()}
    taken = [f"{counted(a, resource)} of {address} by {_job_words(job, known)}" for (address, job), a in by_job.items()]
    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    for address, free, total in machines:
        others = total - free - sum(amount for (place, _), amount in by_job.items() if place == address)
        if others > 1e-6:
            classes = sorted({actor["ActorClassName"] for actor in alive if actor["Address"]["IPAddress"] == address})
            named = f" (actors there: {', '.join(classes)})" if classes else ""
            taken.append(f"{counted(round(others, 4), resource)} of {address} by other actors or tasks{named}")
    return taken


def _job_words(job: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    facts = known.get(job)
    if job == ray.get_runtime_context().get_job_id():
        return "this run"
    if facts is None:
        return f"job {job}"
    command = " ".join(str(facts["Entrypoint"]).split())
    short = command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]}..."
    return f"job {job} (process {facts['DriverPid']} on {facts['DriverIPAddress']}: {short})"


def fitting(pool: Pool, facts: Resources) -> int:
    """Bundles of the pool that there is room for."""
    size = pool.bundle[pool.resource]
    return int(sum(min(1, free // size) if pool.by_machine else free // size for _, free, _ in facts.machines))


def no_room(pool: Pool, wait_s: float, facts: Resources) -> str:
    """What was asked for, what is free, what has taken the rest, and what to do."""
    lines = [
        f"Ray had no room for the {pool.name} workers within {wait_s:g} s ({TIMEOUT}).",
        f"  asked: {pool.words()} ({pool.settings})",
        f"  free now: {facts.free_words()}",
        f"  missing: {pool.words(max(1, pool.count - fitting(pool, facts)))}",
        *(f"  taken: {taker}" for taker in facts.takers),
        "Start Ray on further machines (ray start --address=HOST:6379, or the command with trainer.node_rank), end "
        f"what holds them, lower the numbers asked for, or wait longer ({TIMEOUT}).",
    ]
    return "\n".join(lines)
