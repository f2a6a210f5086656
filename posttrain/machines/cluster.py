"""The machines of a run's Ray as the driver sees them, so that rewards, tools and agents are not bound to its cores.

    with other_machines(say) as machines:
        ready = machines.prepare("rewards", make, "rewards are not computed", say)
        places = Places(start_here, 8, "rewards", [(machine, 8) for machine in ready])
        worker = places.start(running)     # on the machine that has the fewest of `running`

A worker process of another machine (`RemoteWorker`) looks like a local one. One whose machine is lost counts as killed
from outside.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from posttrain.errors import first_line
from posttrain.machines.channel import SEND_S, Channel, Relay, Wake
from posttrain.machines.host import LOOK_S, End, MachineHost, Starter, WorkerProcess

ANSWER_S = 120.0  # for all machines to start their hosts, and to make ready for a kind of workers
# Groups of calls of the actor, each in a thread of its own: nothing waits for a worker to write, or for a user's file.
READING, PREPARING = "reading", "preparing"
# A host answers after LOOK_S at the latest. One that was stopped stays connected, so only its silence shows it.
SILENT_LOOKS = 6
LOOKUP_S = 5.0  # for a host to say whether a worker is stopped, or what was printed


class RemoteWorker:
    """A worker process on another machine."""

    shares_clock = False

    def __init__(self, machine: Machine, number: int, kind: str) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.relay = Channel(ours, send_s=SEND_S), Relay(theirs)
        self.machine, self.where, self.kind, self._number = machine, machine.address, kind, number
        self.end: End | None = None

    def set_end(self, end: End) -> None:
        self.end = end
        self.relay.write(is_last=True)  # so `end` is known when the channel ends

    def ended(self) -> End:
        return self.end or End("it closed its connection")

    def exit_text(self) -> str:
        return self.ended().text

    def was_killed(self) -> bool:
        return self.ended().killed

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, or its host: one that does not answer is taken for stopped."""
        return self.end is None and self.machine.is_stopped(self._number)

    def stop(self) -> bool:
        """Have it killed; returns whether its end is known. If not, its channel ends when its machine reports it."""
        if self.end is None:
            self.machine.kill(self._number)
        return self.end is not None

    def kill(self) -> None:
        self.machine.forget(self._number)
        self.channel.close()


class Machine:
    """One machine of the cluster: its host, and the threads that pass bytes on."""

    def __init__(self, host: Any, address: str, cores: int) -> None:
        self.host, self.address, self.cores, self.lost = host, address, cores, False
        # Kinds of workers that can be started, and what is called with the reason if that is over.
        self._ready: dict[str, Callable[[str], object]] = {}
        self._workers: dict[int, RemoteWorker] = {}
        self._numbers = count()
        self._wake = Wake()
        self._is_silent = False  # it did not answer when it was asked for a worker, and nothing has come since
        for work in (self._pass_to_workers, self._pass_from_workers):
            threading.Thread(target=work, name=f"workers on {address}", daemon=True).start()

    def set_ready(self, kind: str, leave_out: Callable[[str], object]) -> None:
        """The machine can start workers of a kind. If that ends, `leave_out` is called with the reason."""
        self._ready[kind] = leave_out

    def can_start(self, kind: str) -> bool:
        """Whether it starts workers of a kind now."""
        return kind in self._ready and not self.lost and not self._is_silent

    def start(self, kind: str) -> RemoteWorker:
        """Starts a worker of a kind for which the machine was prepared."""
        number = next(self._numbers)
        worker = self._workers[number] = RemoteWorker(self, number, kind)
        self.host.start.remote(number, kind)
        self._wake.set()
        if self.lost:  # meanwhile
            self._end_all()
        return worker

    def kill(self, number: int) -> None:
        if not self.lost:
            self.host.kill.remote(number)

    def is_stopped(self, number: int) -> bool:
        import ray

        if not self._is_silent:
            try:
                return ray.get(self.host.is_stopped.remote(number), timeout=LOOKUP_S)
            except Exception:  # also where the machine is lost
                self._is_silent = True
        return True

    def printed(self) -> list[str]:
        """What its host and workers have printed there; nothing where the machine does not answer."""
        import ray

        try:
            return ray.get(self.host.printed.remote(), timeout=LOOKUP_S)
        except Exception:
            return []

    def forget(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is not None:
            worker.relay.socket.close()
            if worker.end is None:
                self.kill(number)

    def _pass_to_workers(self) -> None:
        while not self.lost:
            workers = list(self._workers.items())
            numbers = {one.relay: number for number, one in workers if one.end is None or one.relay.has_more}
            for relay in self._wake.wait(numbers, LOOK_S):
                relay.write()
                if data := relay.read():
                    self.host.write.remote(numbers[relay], data)

    def _read(self) -> Any:
        """What has arrived there; a TimeoutError where the host does not answer."""
        import ray

        asked = self.host.read.options(concurrency_group=READING).remote()
        for _ in range(SILENT_LOOKS):  # looks are counted, not seconds: this process itself may have been stopped
            with contextlib.suppress(TimeoutError):
                return ray.get(asked, timeout=LOOK_S)
            if self.lost:
                break
        raise TimeoutError

    def _pass_from_workers(self) -> None:
        while not self.lost:
            try:
                arrived = self._read()
            except Exception as error:  # the actor, its machine or the whole Ray is gone, or stands still
                if self.lost:  # given up by `close`
                    return
                silent = f"it did not answer for {SILENT_LOOKS * LOOK_S:g} s"
                self._leave_out(list(self._ready), silent if isinstance(error, TimeoutError) else "it was lost")
                self.close()  # a stopped host may continue later, with workers that no process reads
                return
            self._is_silent = False
            for number, data, end in arrived:
                worker = self._workers.get(number)
                if worker is not None:
                    worker.relay.write(data)
                    if worker.relay.has_more:
                        self._wake.set()
                    if end is not None:
                        if not end.started:  # the next one would fail too, and an idle machine would be chosen again
                            self._leave_out([worker.kind], end.text)
                        worker.set_end(end)

    def _leave_out(self, kinds: Iterable[str], why: str) -> None:
        for kind in kinds:
            if leave_out := self._ready.pop(kind, None):
                leave_out(why)

    def _end_all(self) -> None:
        self.lost = True
        self._wake.set()
        for worker in list(self._workers.values()):
            if worker.end is None:
                worker.set_end(End(f"its machine {self.address} was lost", killed=True, running=None))
            worker.relay.shut_down()  # nothing passes on what is left

    def close(self) -> None:
        """Ends its workers."""
        import ray

        self._end_all()
        with contextlib.suppress(Exception):
            ray.kill(self.host)


class Places:
    """Where worker processes of one kind are started: on the driver's machine, and on others. Each has a share, in
    proportion to which it gets workers: up to `most`, as long as another one has fewer."""

    def __init__(
        self,
        start_here: Callable[[], WorkerProcess],
        here: int,
        kind: str = "",
        others: Sequence[tuple[Machine, int]] = (),
        most: float = math.inf,
    ) -> None:
        self._start_here, self._here, self._kind, self._others, self._most = start_here, here, kind, others, most

    @property
    def room(self) -> int:
        """The shares of all machines together."""
        return sum(share for _, share in self._shares)

    @property
    def machines(self) -> int:
        """How many machines there are."""
        return len(self._shares)

    @property
    def _shares(self) -> list[tuple[Machine | None, int]]:
        return [(None, self._here), *(one for one in self._others if self.has(one[0]))]

    def has(self, machine: Machine | None) -> bool:
        """Whether workers are started on this machine; None is the driver's."""
        return machine is None or machine.can_start(self._kind)

    def start(self, running: Iterable[WorkerProcess]) -> Any:
        """Starts a worker on the machine that has the fewest of these for its share."""
        counts = Counter(worker.machine for worker in running)
        below = [one for one in self._shares if counts[one[0]] < self._most]
        machine, _ = min(below or self._shares, key=lambda one: counts[one[0]] / one[1])
        return self._start_here() if machine is None else machine.start(self._kind)


class Machines:
    """The other machines of a run's Ray."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines

    def __bool__(self) -> bool:
        return bool(self._machines)

    def prepare(
        self, kind: str, make: Callable[[], Starter], problem: str, say: Callable[[str], object]
    ) -> list[Machine]:
        """The machines that can start workers of a kind, by the starter that `make` returns there. One on which it
        raises is left out, with a note that begins with `problem`; so is one that later cannot start them any more."""
        asked = []
        for machine in self._machines:
            prepare = machine.host.prepare.options(concurrency_group=PREPARING)
            asked.append((machine, prepare.remote(kind, make)))
        ready = []
        for (machine, _), (why, error) in zip(asked, _answers(answer for _, answer in asked), strict=True):
            if why or error:
                say(f"note: {problem} on {machine.address}: {why or error}")
            else:
                machine.set_ready(kind, partial(_say_left_out, say, problem, machine.address))
                ready.append(machine)
        return ready

    def printed(self) -> Iterator[tuple[str, list[str]]]:
        """(address, what was printed there) of each machine."""
        for machine in self._machines:
            if not machine.lost:
                yield machine.address, machine.printed()

    def close(self) -> None:
        """Ends what they run."""
        for machine in self._machines:
            machine.close()


@contextlib.contextmanager
def other_machines(say: Callable[[str], object]) -> Iterator[Machines]:
    """The machines of this process's Ray beside the driver's. All that they run ends with the context."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = ray.get_runtime_context().get_node_id()
    # A node that Ray gives no cores is not meant to work.
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own and node["Resources"].get("CPU")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POSTTRAIN_RAY"))}
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        groups: dict[str, Any] = {"concurrency_groups": {READING: 1, PREPARING: 1}}  # not in Ray's annotations
        actor: Any = ray.remote(num_cpus=0, **groups)(MachineHost)
        actor = actor.options(scheduling_strategy=there, max_concurrency=1)
        host = actor.remote(os.getcwd(), variables)
        asked.append((node["NodeManagerAddress"], host, host.cores.remote()))
    machines = []
    for (address, host, _), (cores, error) in zip(asked, _answers(answer for _, _, answer in asked), strict=True):
        if error:  # training does not need a machine that cannot start a process
            say(f"note: rewards, tools and agents do not run on {address}: {error}")
            ray.kill(host)
        else:
            machines.append(Machine(host, address, cores))
    with contextlib.closing(Machines(machines)) as made:
        yield made


def _answers(asked: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """What Ray's calls gave, each with its error or an empty text. All of them together have ANSWER_S seconds."""
    import ray

    end = time.monotonic() + ANSWER_S
    for answer in asked:
        try:
            yield ray.get(answer, timeout=max(0.0, end - time.monotonic())), ""
        except Exception as error:
            yield None, first_line(error)


def _say_left_out(say: Callable[[str], object], problem: str, address: str, why: str) -> None:
    say(f"note: {problem} on {address} any more: {why}")
