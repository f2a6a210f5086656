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
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from posttrain.errors import first_line
from posttrain.machines.channel import SEND_S, Channel, Relay, Wake
from posttrain.machines.host import LOOK_S, End, MachineHost, Starter, WorkerProcess

ANSWER_S = 120.0  # for a machine to start its host, and to make ready for a kind of workers
READING = "reading"  # of the actor: beside the calls that change something, which come one after the other


class RemoteWorker:
    """A worker process on another machine."""

    shares_clock = False

    def __init__(self, machine: Machine, number: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel, self.relay = Channel(ours, send_s=SEND_S), Relay(theirs)
        self.machine, self.where, self._number = machine, machine.address, number
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
        """Whether a signal holds it, which is not known here."""
        return False

    def stop(self) -> bool:
        """Has it killed. False: its channel ends when its machine has said how it ended."""
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
        self._workers: dict[int, RemoteWorker] = {}
        self._numbers = count()
        self._wake = Wake()
        for work in (self._pass_to_workers, self._pass_from_workers):
            threading.Thread(target=work, name=f"workers on {address}", daemon=True).start()

    def start(self, kind: str) -> RemoteWorker:
        """Starts a worker of a kind for which the machine was prepared."""
        number = next(self._numbers)
        worker = self._workers[number] = RemoteWorker(self, number)
        self.host.start.remote(number, kind)
        self._wake.set()
        if self.lost:  # meanwhile
            self._end_all()
        return worker

    def kill(self, number: int) -> None:
        if not self.lost:
            self.host.kill.remote(number)

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

    def _pass_from_workers(self) -> None:
        import ray

        while not self.lost:
            try:
                arrived = ray.get(self.host.read.options(concurrency_group=READING).remote())
            except Exception:  # the actor, its machine or the whole Ray is gone
                self._end_all()
                return
            for number, data, end in arrived:
                worker = self._workers.get(number)
                if worker is not None:
                    worker.relay.write(data)
                    if worker.relay.has_more:
                        self._wake.set()
                    if end is not None:
                        worker.set_end(end)

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
    proportion to which it gets workers."""

    def __init__(
        self,
        start_here: Callable[[], WorkerProcess],
        here: int,
        kind: str = "",
        others: Sequence[tuple[Machine, int]] = (),
    ) -> None:
        self._start_here, self._here, self._kind, self._others = start_here, here, kind, others

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
        return [(None, self._here), *((machine, share) for machine, share in self._others if not machine.lost)]

    def start(self, running: Iterable[WorkerProcess]) -> Any:
        """Starts a worker on the machine that has the fewest of these for its share."""
        counts = Counter(worker.machine for worker in running)
        machine, _ = min(self._shares, key=lambda one: counts[one[0]] / one[1])
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
        """Those that can start workers of a kind, by what `make` gives there. A machine on which it raises is left out,
        with a note of which `problem` is the beginning."""
        import ray

        asked = [(machine, machine.host.prepare.remote(kind, make)) for machine in self._machines]
        ready = []
        for machine, answer in asked:
            try:
                why = ray.get(answer, timeout=ANSWER_S)
            except Exception as error:
                why = first_line(error)
            if why:
                say(f"note: {problem} on {machine.address}: {why}")
            else:
                ready.append(machine)
        return ready

    def close(self) -> None:
        """Ends what they run."""
        for machine in self._machines:
            machine.close()


@contextlib.contextmanager
def other_machines(say: Callable[[str], object]) -> Iterator[Machines]:
    """The machines of this process's Ray beside the driver's. What they run is ended behind it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = ray.get_runtime_context().get_node_id()
    # A node that Ray gives no cores is not meant to work.
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != own and node["Resources"].get("CPU")]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "POSTTRAIN_RAY"))}
    asked = []
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        groups: dict[str, Any] = {"concurrency_groups": {READING: 1}}  # Ray's annotations do not have it
        actor: Any = ray.remote(num_cpus=0, **groups)(MachineHost)
        actor = actor.options(scheduling_strategy=there, max_concurrency=1)
        host = actor.remote(os.getcwd(), variables)
        asked.append((node["NodeManagerAddress"], host, host.cores.remote()))
    machines = []
    for address, host, answer in asked:
        try:
            machines.append(Machine(host, address, ray.get(answer, timeout=ANSWER_S)))
        except Exception as error:  # a machine that cannot start a process is no reason not to train
            say(f"note: rewards, tools and agents do not run on {address}: {first_line(error)}")
            ray.kill(host)
    with contextlib.closing(Machines(machines)) as made:
        yield made
