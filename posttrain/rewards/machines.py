"""Reward workers on all machines of a run's Ray, so that slow functions are not bound to the driver's cores.

A `RewardHost` is a Ray actor, one per machine. It starts worker processes there, as the driver does on its own machine,
and passes bytes between them and the driver. `RemoteWorker` looks to a Crew like a local worker. Messages travel in
Ray's calls, which Ray protects by its token; no further port is opened. A worker of a lost machine counts as killed
from outside, so its task is tried again elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from posttrain import cores
from posttrain.errors import first_line
from posttrain.rewards.channel import Channel
from posttrain.rewards.crew import SEND_S, WorkerProcess
from posttrain.rewards.pool import MOST, pool_size
from posttrain.rewards.types import RewardSpec

ANSWER_S = 120.0  # for a machine to start its host
LOOK_S = 10.0  # an answer without content, so that a host that nobody asks any more can end
_READ = 1 << 18
READING = "reading"  # of the actor: beside the calls that change something, which come one after the other


@dataclass
class End:
    """How a worker process on another machine ended."""

    text: str
    killed: bool


Arrived = list[tuple[int, bytes, End | None]]  # (worker, what it wrote, how it ended)


class RewardHost:
    """Becomes a Ray actor. Calls that change something come one after the other; `read` waits beside them."""

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # relative paths of a reward are those of the command
            os.chdir(folder)
        # What the reward finds on the driver's machine it finds here: keys of judges, settings. What this machine has
        # set itself stays.
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        self._workers: dict[int, WorkerProcess] = {}
        self._wake_read, self._wake_write = os.pipe()

    def check(self, check: Callable[[], Any] | None) -> tuple[int, str]:
        """(cores that may be used, why rewards cannot be computed here or an empty text)."""
        try:
            if check is not None:
                check()
        except Exception as error:
            return cores.usable(), str(error)
        return cores.usable(), ""

    def start(self, number: int, spec: bytes) -> None:
        self._workers[number] = WorkerProcess(pickle.loads(spec))  # the driver's own, by Ray's call
        os.write(self._wake_write, b".")

    def write(self, number: int, data: bytes) -> None:
        worker = self._workers.get(number)
        if worker is not None:
            with contextlib.suppress(OSError):  # it has died, which `read` reports
                worker.channel.socket.sendall(data)

    def kill(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is not None:
            worker.kill()

    def read(self) -> Arrived:
        """What workers have written, as soon as one has."""
        sources = {worker.channel.socket: number for number, worker in list(self._workers.items())}
        try:
            ready, _, _ = select.select([*sources, self._wake_read], [], [], LOOK_S)
        except (OSError, ValueError):  # a worker was killed meanwhile
            return []
        found: Arrived = []
        for source in ready:
            if isinstance(source, int):  # the pipe that wakes this up
                os.read(self._wake_read, 1)
                continue
            number = sources[source]
            with contextlib.suppress(OSError):
                data = os.read(source.fileno(), _READ)
                found.append((number, data, None if data else self._end(number)))
        return found

    def _end(self, number: int) -> End:
        worker = self._workers.pop(number, None)
        if worker is None:
            return End("it was ended", False)
        end = End(worker.exit_text(), worker.was_killed())
        worker.kill()  # and what it has started
        return end


class RemoteWorker:
    """A worker process on another machine, as a Crew uses one."""

    shares_clock = False

    def __init__(self, machine: Machine, number: int) -> None:
        ours, self.theirs = socket.socketpair()
        self.channel, self.where = Channel(ours, send_s=SEND_S), machine.address
        self._machine, self._number = machine, number
        self.end: End | None = None
        self.ended = threading.Event()

    def exit_text(self) -> str:
        self.ended.wait(2)
        return self.end.text if self.end else "it closed its connection"

    def was_killed(self) -> bool:
        self.ended.wait(2)
        return self.end is not None and self.end.killed

    def kill(self) -> None:
        self._machine.forget(self._number)
        self.channel.close()


class Machine:
    """One machine of the cluster: its host, and the threads that pass bytes on. `room` is how many workers it takes."""

    def __init__(self, host: Any, address: str, room: int) -> None:
        self.host, self.address, self.room, self.lost = host, address, room, False
        self._workers: dict[int, RemoteWorker] = {}
        self._numbers = count()
        self._wake_read, self._wake_write = os.pipe()
        for work in (self._pass_to_workers, self._pass_from_workers):
            threading.Thread(target=work, name=f"rewards on {address}", daemon=True).start()

    @property
    def free(self) -> int:
        """How many more workers it takes."""
        return 0 if self.lost else self.room - len(self._workers)

    def start(self, spec: RewardSpec) -> RemoteWorker:
        number = next(self._numbers)
        worker = RemoteWorker(self, number)
        self.host.start.remote(number, pickle.dumps(spec))
        self._workers[number] = worker
        os.write(self._wake_write, b".")
        if self.lost:  # meanwhile
            self._end_all()
        return worker

    def forget(self, number: int) -> None:
        worker = self._workers.pop(number, None)
        if worker is not None:
            worker.theirs.close()
            if not self.lost:
                self.host.kill.remote(number)

    def _pass_to_workers(self) -> None:
        while not self.lost:
            sources = {worker.theirs: number for number, worker in list(self._workers.items())}
            try:
                ready, _, _ = select.select([*sources, self._wake_read], [], [], LOOK_S)
                for source in ready:
                    if isinstance(source, int):  # the pipe that wakes this up
                        os.read(self._wake_read, 1)
                    elif data := source.recv(_READ):
                        self.host.write.remote(sources[source], data)
            except (OSError, ValueError):  # the Crew has killed a worker meanwhile
                continue

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
                    with contextlib.suppress(OSError):
                        worker.theirs.sendall(data)
                    if end is not None:
                        self._end(worker, end)

    def _end(self, worker: RemoteWorker, end: End) -> None:
        worker.end = end
        worker.ended.set()
        with contextlib.suppress(OSError):
            worker.theirs.shutdown(socket.SHUT_RDWR)

    def _end_all(self) -> None:
        self.lost = True
        for worker in list(self._workers.values()):
            self._end(worker, End(f"its machine {self.address} was lost", True))

    def close(self) -> None:
        """End its workers."""
        import ray

        self._end_all()
        with contextlib.suppress(Exception):
            ray.kill(self.host)


class Machines:
    """Where the workers of a pool are started: on the machine with the most room, or `here` on the driver's."""

    def __init__(self, machines: list[Machine], here: int) -> None:
        self.machines, self.here = machines, here

    @property
    def room(self) -> int:
        return self.here + sum(machine.room for machine in self.machines if not machine.lost)

    def start(self, spec: RewardSpec) -> WorkerProcess | RemoteWorker:
        roomiest = max(self.machines, key=lambda machine: machine.free)
        return roomiest.start(spec) if roomiest.free > 0 else WorkerProcess(spec)

    def close(self) -> None:
        for machine in self.machines:
            machine.close()


@contextlib.contextmanager
def other_machines(
    num_workers: int | None, check: Callable[[], Any] | None, say: Callable[[str], object]
) -> Iterator[Machines | None]:
    """The machines of this process's Ray that compute rewards beside the driver's; None where there is no other.

    `num_workers` is `reward.num_workers`, for each machine. A machine on which `check` fails is left out.
    """
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
        actor: Any = ray.remote(num_cpus=0, **groups)(RewardHost)
        actor = actor.options(scheduling_strategy=there, max_concurrency=1)
        host = actor.remote(os.getcwd(), variables)
        asked.append((node["NodeManagerAddress"], host, host.check.remote(check)))
    machines = []
    for address, host, answer in asked:
        try:
            usable, problem = ray.get(answer, timeout=ANSWER_S)
        except Exception as error:  # a machine that cannot start a process is no reason not to train
            usable, problem = 0, first_line(error)
        if problem:
            say(f"note: rewards are not computed on {address}: {problem}")
            ray.kill(host)
        else:
            machines.append(Machine(host, address, num_workers or min(MOST, usable)))
    if not machines:
        yield None
        return
    made = Machines(machines, pool_size(num_workers))
    try:
        say(f"Reward workers: {made.room} on {len(machines) + 1} machines.")
        yield made
    finally:
        made.close()
