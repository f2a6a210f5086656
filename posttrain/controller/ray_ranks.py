"""The driver's view of the ranks: their names and processes, and waits that notice one that died or stands still."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from posttrain.controller.incidents import (
    CONTINUES,
    EVERY_S,
    STOPPED,
    TRACED,
    Incident,
    PeerLost,
    Process,
    StallWatch,
    State,
    WorkerDied,
    WorkersHung,
    append_log,
    death_of,
    dump_stacks,
    facts_of,
    is_about_a_peer,
    printed_lines,
    starting_states,
    state_of,
)
from posttrain.controller.pool import role_of
from posttrain.controller.rank_host import Failure, Identity, unpack
from posttrain.controller.ray_cluster import ITSELF, Machine
from posttrain.errors import first_line

# For Ray's word on the other ranks when one could not talk to them; of a lost machine it takes Ray 15 s or more.
PEERS_S = 60.0
LINES = 40  # of what a lost rank printed last, on the page of the incident


class NodeObserver:
    """Becomes a Ray actor, one on every machine but the driver's: looks at the processes of the ranks there. It is a
    process of its own, so that it answers whatever the ranks do."""

    def look(self, processes: list[Process]) -> list[State | None]:
        return [state_of(process) for process in processes]

    def read(self, files: list[str]) -> list[str]:
        return printed_lines(files)

    def stacks(self, processes: list[tuple[Process, str]]) -> list[str]:
        return [dump_stacks(*process) for process in processes]

    def end(self, processes: list[Process]) -> None:
        for process in processes:
            end_process(process)


def end_process(process: Process) -> None:
    """Kill a rank. Ray asks a process to end itself, which one that is stopped does not do."""
    if state_of(process) is not None:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)


@dataclass
class Rank:
    """One process of the run."""

    name: str
    host: Any
    machine: Machine
    identity: Identity | None = None  # None until its process has reported it

    @property
    def who(self) -> str:
        role, number = role_of(self.name), self.name.rpartition(" ")[2]
        kind = "Rank" if role == "rank" else f"{role.replace('_', ' ').capitalize()} worker"
        name = f"{kind} {number}"
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

    def __init__(
        self, limit_s: float, tell: Callable[[str], None], logs: Path | None = None, hung_s: float = math.inf
    ) -> None:
        self.ranks: list[Rank] = []
        self._calls: dict[str, str] = {}  # by actor, the last method that it was asked for
        self._seen: dict[str, State] = {}  # by rank, its process when it was last looked at and there
        self.logs = logs
        self.kept: set[str] = set()  # files of Ray that are in the log already
        self.stalls = StallWatch(limit_s, tell, hung_s=hung_s)
        self._observers: dict[str, tuple[Any, _Asked]] = {}
        self._own_node = ""
        # Roles whose workers are replaced one by one: one that stands still is ended, and the others go on.
        self.replaced_alone: set[str] = set()
        self._lost: dict[str, WorkerDied] = {}  # by name, workers that are to be replaced

    def begin(self, ranks: Sequence[Rank]) -> None:
        """Get to know these ranks, as soon as their processes are there."""
        self.ranks, self._own_node = list(ranks), ray.get_runtime_context().get_node_id()
        for machine in {rank.machine.id for rank in ranks} - {self._own_node}:
            there = NodeAffinitySchedulingStrategy(machine, soft=False)
            observer = ray.remote(NodeObserver).options(num_cpus=0, max_restarts=-1, scheduling_strategy=there)
            self._observers[machine] = (observer.remote(), _Asked())
        self._meet(ranks, self.stalls.hung_s)

    def replace(self, ranks: Sequence[Rank], wait_s: float) -> None:
        """These ranks take the places of those with their names, once their processes are there."""
        for rank in ranks:
            self._put_in_place(rank)
        self._meet(ranks, wait_s)

    def _put_in_place(self, rank: Rank) -> None:
        old = next(own for own in self.ranks if own.name == rank.name)
        if old.identity is not None and not {Path(file).name for file in old.identity.files} <= self.kept:
            self._keep(old, self._printed(old))  # it stood still, and was ended: nothing was read of it yet
        self._end_rank(old)  # one that held a model with the lost one may wait for it in a collective
        self.ranks = [rank if old.name == rank.name else old for old in self.ranks]
        self._lost.pop(rank.name, None)

    def _meet(self, ranks: Sequence[Rank], wait_s: float) -> None:
        """Get to know the processes of these ranks, which may take so many seconds to start."""
        asked = [rank.host.identity.remote() for rank in ranks]
        waiting, until = list(asked), time.monotonic() + wait_s
        while waiting:
            ready, waiting = self.wait(waiting, until)
            if not ready:
                hung = WorkersHung(f"Workers did not start within {wait_s:g} s. {CONTINUES}")
                hung.who = ", ".join(self._ranks_awaited(waiting))
                hung.incident = self._describe(hung.who)
                raise hung
        for rank, found in zip(ranks, self.gather(asked), strict=True):
            rank.identity = found

    def can_be_replaced(self, death: WorkerDied) -> bool:
        """Whether one worker was lost, and the others may go on while it is replaced."""
        return role_of(death.worker) in self.replaced_alone

    def end(self) -> None:
        """The ranks are ended on purpose."""
        for rank in self.ranks:
            if rank.identity is not None and rank.machine.id == self._own_node:
                end_process(rank.identity.process)
        for machine, (observer, _) in self._observers.items():
            there = [r.identity.process for r in self.ranks if r.identity is not None and r.machine.id == machine]
            with suppress(Exception):  # the machine may be lost
                ray.get(observer.end.remote(there), timeout=5)
        for observer, _ in self._observers.values():
            with suppress(Exception):
                ray.kill(observer)
        self._observers = {}

    def note_call(self, host: Any, method: str) -> None:
        """A rank is asked for a method: a page on an incident names it."""
        self._calls[host._actor_id.hex()] = method

    # -- waiting ------------------------------------------------------------------------------------------------------
    def wait(self, refs: Sequence[Any], until: float = math.inf) -> tuple[list[Any], list[Any]]:
        """(one that is ready, the others); none is ready where that takes longer than `until`. Raises WorkerStopped
        where a rank is stopped for too long, and WorkersHung where none goes on; workers that can be replaced alone
        are ended instead."""
        while True:
            # Never without a timeout: a stopped process neither answers nor fails, and is only seen by looking at it.
            ready, waiting = ray.wait(list(refs), num_returns=1, timeout=EVERY_S)
            if ready:
                self.stalls.answered()
            if self.stalls.is_due():
                try:
                    self.stalls.look(self._states(), self._ranks_awaited(waiting))
                except WorkerDied as lost:
                    lost.incident = self._describe(lost.who)
                    if not self._end_to_replace(lost):
                        raise
            if ready or time.monotonic() > until:
                return ready, waiting

    def _end_to_replace(self, lost: WorkerDied) -> bool:
        """End the workers that stand still, if all of them can be replaced alone. Calls to them fail from then on, and
        the first caller whose call fails has the worker replaced."""
        standing = [rank for rank in self.ranks if rank.who in lost.who]
        if not all(role_of(rank.name) in self.replaced_alone for rank in standing):
            return False
        for rank in standing:
            own = type(lost)(*lost.args)
            own.who, own.worker, own.incident = rank.who, rank.name, lost.incident
            self._lost.setdefault(rank.name, own)
            self._end_rank(rank)
        return bool(standing)

    def _end_rank(self, rank: Rank) -> None:
        if rank.identity is None:
            return
        if rank.machine.id == self._own_node:
            end_process(rank.identity.process)
        else:
            self._observers[rank.machine.id][0].end.remote([rank.identity.process])

    def fetch(self, ref: Any, beside: Any = None) -> Any:
        """What a rank answered, private to this process; its error is raised, or what caused that. `beside` is the
        reference to the call's second result, if it has one."""
        # Rows of the value that lie with a worker are read later, and waited for as an answer is.
        value = unpack(self.plain(ref), beside, lambda rows: self.wait([rows]))
        if isinstance(value, Failure):
            raise self._cause_of(value.as_raised())
        return value

    def gather(self, refs: Sequence[Any], read: Callable[[Any], Any] | None = None) -> list[Any]:
        """What several answered, each as `read` (by default `fetch`) gives it. The first error of any rank is raised,
        though others may wait for that rank for ever."""
        read = read or self.fetch
        found, waiting = {}, list(refs)
        while waiting:
            ready, waiting = self.wait(waiting)
            found[ready[0]] = read(ready[0])
        return [found[ref] for ref in refs]

    def gather_from_others(self, refs: Sequence[Any], read: Callable[[Any], Any], missing: Any) -> list[Any]:
        """As `gather`; `missing` stands for the answer of a worker that is lost and will be replaced."""

        def read_or_miss(ref: Any) -> Any:
            try:
                return read(ref)
            except WorkerDied as death:
                if not self.can_be_replaced(death):
                    raise
                return missing

        return self.gather(refs, read_or_miss)

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
            first = str(error).strip().splitlines()[0]
            raise cause or WorkerDied(f"A worker could not be reached: {first} {CONTINUES}") from error

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
            # What it has answered may be older than a replacement: the lost worker's process was stopped then.
            states |= {who: asked.states[who] for who in there if who in asked.states}
        if len(known) < len(self.ranks):
            states |= starting_states()
        self._seen |= {who: state for who, state in states.items() if state is not None and state.memory_gb}
        return states

    def _ranks_awaited(self, refs: Sequence[Any]) -> list[str]:
        actors = {ref.task_id().actor_id().hex() for ref in refs}
        return [rank.who for rank in self.ranks if rank.actor_id in actors]

    # -- errors -------------------------------------------------------------------------------------------------------
    def _cause_of(self, error: Exception) -> Exception:
        # A rank that could not talk to another fails before Ray knows that the other is gone. It is waited for what
        # Ray says of the others; without a word, all are alive and only their connection is gone.
        if not is_about_a_peer(error):
            return error
        death = self._word_of_peers()
        if death is None and isinstance(error, PeerLost):
            error.incident = self._describe("")
            return error
        if death is None:
            death = PeerLost(
                f"A worker could not talk to the others, though all of them are alive: {first_line(error)}. The "
                f"network between them was cut, or a device failed. {CONTINUES}"
            )
            death.incident = self._describe("")
        death.__cause__ = error
        return death

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
        if rank is not None and rank.name in self._lost:
            return self._lost[rank.name]
        if rank is None:
            death = death_of(error)
            death.incident = self._describe("")
            return death
        lines = self._printed(rank)
        death = death_of(error, rank.who, role=role_of(rank.name), printed=self._keep(rank, lines))
        death.who, death.worker, death.incident = rank.who, rank.name, self._describe(rank.who, lines)
        if self.can_be_replaced(death):
            self._lost[rank.name] = death  # noticed by several calls, and reported once
        return death

    def _describe(self, who: str, printed: Sequence[str] = ()) -> Incident:
        """What is known of all ranks now. The lost one's stacks are gone with it, or it cannot print them."""
        seen = self._seen  # a process that is gone says nothing any more
        states = {name: _in_words(state, seen.get(name)) for name, state in self._states().items()}
        calls = {rank.who: self._calls[rank.actor_id] for rank in self.ranks if rank.actor_id in self._calls}
        return Incident(who, calls, states, self._stacks(), printed[-LINES:])

    def _stacks(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for machine in dict.fromkeys(rank.machine.id for rank in self.ranks):
            known = [(rank.who, rank.identity) for rank in self.ranks if rank.machine.id == machine]
            there = {who: (own.process, own.files[-1]) for who, own in known if own is not None and own.files}
            if machine == self._own_node:
                stacks = [dump_stacks(*process) for process in there.values()]
            else:
                try:
                    asked = self._observers[machine][0].stacks.remote(list(there.values()))
                    stacks = ray.get(asked, timeout=10)
                except (RayError, KeyError):
                    continue
            found |= {who: text for who, text in zip(there, stacks, strict=True) if text}
        return found

    def _printed(self, rank: Rank) -> list[str]:
        if rank.identity is None:
            return []
        files = rank.identity.files
        return printed_lines(files) if rank.machine.id == self._own_node else self._read_there(rank.machine.id, files)

    def _keep(self, rank: Rank, lines: Sequence[str]) -> str:
        """Writes what it has printed to the run's log; a sentence that says where, once it is there."""
        path = append_log(lines, rank.who, self.logs) if self.logs is not None else None
        if path is None or rank.identity is None:
            return ""
        self.kept |= {Path(file).name for file in rank.identity.files}
        return f" What it printed last is in {path}."

    def _read_there(self, machine: str, files: Sequence[str]) -> list[str]:
        try:
            return self.read_there(machine, files)
        except (RayError, KeyError):
            return []

    def read_there(self, machine: str, files: Sequence[str]) -> list[str]:
        """Lines that a rank of another machine has printed to these files there."""
        return ray.get(self._observers[machine][0].read.remote(list(files)), timeout=5)


_KINDS = {"R": "computing", "S": "waiting", "D": "waiting for a disk", STOPPED: "stopped", TRACED: "in a debugger"}


def _in_words(state: State | None, before: State | None) -> str:
    kind = "gone" if state is None else _KINDS.get(state.letter, "gone")
    known = before if kind == "gone" else state
    return kind if known is None else f"{kind}; {known.memory_gb:.2f} GB resident, {known.seconds:.0f} s computed"
