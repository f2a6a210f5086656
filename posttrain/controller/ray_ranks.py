"""The driver's view of the ranks: their names and processes, and waits that notice one that died or stands still."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.controller.rank_host import Failure, Identity, unpack
from posttrain.controller.ray_cluster import ITSELF, Machine
from posttrain.controller.stalls import (
    CONTINUES,
    EVERY_S,
    Process,
    StallWatch,
    State,
    WorkerDied,
    append_log,
    death_of,
    facts_of,
    is_about_a_peer,
    printed_lines,
    state_of,
)

# For Ray's word on the other ranks when one could not talk to them; of a lost machine it takes Ray 15 s or more.
PEERS_S = 60.0


class NodeObserver:
    """Becomes a Ray actor, one on every machine but the driver's: looks at the processes of the ranks there. It is a
    process of its own, so that it answers whatever the ranks do."""

    def look(self, processes: list[Process]) -> list[State | None]:
        return [state_of(process) for process in processes]

    def read(self, files: list[str]) -> list[str]:
        return printed_lines(files)


@dataclass
class Rank:
    """One process of the run."""

    name: str
    host: Any
    machine: Machine
    identity: Identity | None = None  # None until its process has reported it

    @property
    def who(self) -> str:
        name = self.name.replace("rollout", "Rollout worker").replace("rank", "Rank")
        if self.identity is None:
            return f"{name} (on {self.machine.address})"
        address = "" if self.machine.address == ITSELF else f", {self.machine.address}"
        return f"{name} (process {self.identity.process.pid} on {self.identity.computer}{address})"

    @property
    def actor_id(self) -> str:
        return self.host._actor_id.hex()


@dataclass
class _Asked:
    """What another machine was asked for, and has last answered."""

    ref: Any = None
    of: list[str] = field(default_factory=list)
    states: dict[str, State | None] = field(default_factory=dict)


class RankWatch:
    """Waits for the ranks' answers. `logs` is the folder that what a dead rank printed is written to."""

    def __init__(self, limit_s: float, tell: Callable[[str], None], logs: Path | None = None) -> None:
        self.ranks: list[Rank] = []
        self.logs = logs
        self.kept: set[str] = set()  # files of Ray that are in the log already
        self.stalls = StallWatch(limit_s, tell)
        self._observers: dict[str, tuple[Any, _Asked]] = {}
        self._own_node = ""

    def begin(self, ranks: Sequence[Rank]) -> None:
        """Get to know these ranks, as soon as their processes are there."""
        self.ranks, self._own_node = list(ranks), ray.get_runtime_context().get_node_id()
        for machine in {rank.machine.id for rank in ranks} - {self._own_node}:
            there = NodeAffinitySchedulingStrategy(machine, soft=False)
            observer = ray.remote(NodeObserver).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there)
            self._observers[machine] = (observer.remote(), _Asked())
        for rank, found in zip(ranks, self.gather([rank.host.identity.remote() for rank in ranks]), strict=True):
            rank.identity = found

    def end(self) -> None:
        """The ranks are ended on purpose."""
        for observer, _ in self._observers.values():
            with suppress(Exception):
                ray.kill(observer)
        self._observers = {}

    # -- waiting ------------------------------------------------------------------------------------------------------
    def wait(self, refs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """(one that is ready, the others). Raises WorkerStopped where a rank is stopped for too long."""
        while True:
            # Never without a timeout: a stopped process neither answers nor fails, and is only seen by looking at it.
            ready, waiting = ray.wait(list(refs), num_returns=1, timeout=EVERY_S)
            if ready:
                self.stalls.answered()
            if self.stalls.is_due():
                self.stalls.look(self._states(), self._ranks_awaited(waiting))
            if ready:
                return ready, waiting

    def fetch(self, ref: Any) -> Any:
        """What a rank answered, private to this process; its error is raised, or what caused that."""
        value = unpack(self.plain(ref))
        if isinstance(value, Failure):
            raise self._cause_of(value.as_raised())
        return value

    def gather(self, refs: Sequence[Any]) -> list[Any]:
        """What several answered. The first error of any rank is raised, though others may wait for that rank for
        ever."""
        found, waiting = {}, list(refs)
        while waiting:
            ready, waiting = self.wait(waiting)
            found[ready[0]] = self.fetch(ready[0])
        return [found[ref] for ref in refs]

    def plain(self, ref: Any) -> Any:
        """The same of an answer that was not packed."""
        self.wait([ref])
        try:
            return ray.get(ref)
        except RayTaskError:
            raise
        except RayError as error:
            # "Unavailable" may be a short loss of the network; only a dead actor is known to be gone.
            if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
                raise self._death(error) from error
            cause = self._word_of_peers()
            raise cause or _unreachable(error) from error

    def _states(self) -> dict[str, State | None]:
        known = [(rank, rank.identity.process) for rank in self.ranks if rank.identity is not None]
        states = {rank.who: state_of(process) for rank, process in known if rank.machine.id == self._own_node}
        for machine, (observer, asked) in self._observers.items():
            there = {rank.who: process for rank, process in known if rank.machine.id == machine}
            # Asked now, read at the next look: a machine that is slow to answer must not hold up the wait itself.
            if asked.ref is not None and ray.wait([asked.ref], timeout=0)[0]:
                with suppress(RayError):  # where the machine is lost, its ranks' answers say so
                    asked.states = dict(zip(asked.of, ray.get(asked.ref), strict=True))
                asked.ref = None
            if asked.ref is None:
                asked.of, asked.ref = list(there), observer.look.remote(list(there.values()))
            states |= asked.states
        return states

    def _ranks_awaited(self, refs: Sequence[Any]) -> list[str]:
        actors = {ref.task_id().actor_id().hex() for ref in refs}
        return [rank.who for rank in self.ranks if rank.actor_id in actors]

    # -- errors -------------------------------------------------------------------------------------------------------
    def _cause_of(self, error: Exception) -> Exception:
        # A rank that could not talk to another fails before Ray knows that the other is gone. It is waited for what
        # Ray says of the others; without a word, the error itself is the cause.
        if not is_about_a_peer(error):
            return error
        death = self._word_of_peers()
        if death is not None:
            death.__cause__ = error
        return death or error

    def _word_of_peers(self) -> WorkerDied | None:
        asked = {rank.host.identity.remote(): rank for rank in self.ranks}
        until = time.monotonic() + PEERS_S
        while asked and time.monotonic() < until:
            ready, _ = ray.wait(list(asked), num_returns=1, timeout=EVERY_S)
            for ref in ready:
                rank = asked.pop(ref)
                try:
                    ray.get(ref)
                except ActorUnavailableError:
                    asked[rank.host.identity.remote()] = rank
                    time.sleep(0.5)
                except RayActorError as error:
                    return self._death(error, rank)
        return None

    def _death(self, error: Exception, rank: Rank | None = None) -> WorkerDied:
        actor = facts_of(error).get("actor_id") or getattr(error, "actor_id", None)
        rank = rank or next((own for own in self.ranks if own.actor_id == actor), None)
        if rank is None:
            return death_of(error)
        rollout = rank.name.startswith("rollout")
        return death_of(error, rank.who, rollout=rollout, printed=self._printed(rank))

    def _printed(self, rank: Rank) -> str:
        """Writes what it has printed to the run's log; a sentence that says where, once it is there."""
        if rank.identity is None or self.logs is None:
            return ""
        files = rank.identity.files
        if rank.machine.id == self._own_node:
            lines = printed_lines(files)
        else:
            lines = self._read_there(rank.machine.id, files)
        path = append_log(lines, rank.who, self.logs)
        if path is None:
            return ""
        self.kept |= {Path(file).name for file in files}
        return f" What it printed last is in {path}."

    def _read_there(self, machine: str, files: Sequence[str]) -> list[str]:
        try:
            return self.read_there(machine, files)
        except (RayError, KeyError):
            return []

    def read_there(self, machine: str, files: Sequence[str]) -> list[str]:
        """Lines that a rank of another machine has printed to these files there."""
        return ray.get(self._observers[machine][0].read.remote(list(files)), timeout=5)


def _unreachable(error: Exception) -> WorkerDied:
    return WorkerDied(f"A worker could not be reached: {str(error).strip().splitlines()[0]} {CONTINUES}")
