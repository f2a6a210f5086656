"""Other machines of a run, in this process: real worker processes behind a host that is called as a Ray actor is."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from posttrain.machines import cluster, host
from posttrain.machines.cluster import Machine, Machines


class Called:
    """A method of the host, called in the thread of a group of calls as Ray does."""

    def __init__(self, method: Any, groups: dict[str, ThreadPoolExecutor], group: str = "") -> None:
        self.method, self.groups, self.group = method, groups, group

    def remote(self, *arguments: Any) -> Future[Any]:
        return self.groups[self.group].submit(self.method, *arguments)

    def options(self, concurrency_group: str) -> Called:
        return Called(self.method, self.groups, concurrency_group)


class Host:
    """A MachineHost in this process; `end` loses its machine, `hang` stops it as SIGSTOP does."""

    def __init__(self) -> None:
        self.host, self.gone = host.MachineHost(os.getcwd(), {"OF_THE_DRIVER": "1"}), False
        self.goes_on = threading.Event()
        self.groups = groups = {name: ThreadPoolExecutor(1) for name in ("", cluster.READING, cluster.PREPARING)}
        for name in ("prepare", "start", "write", "kill", "is_stopped", "printed"):
            setattr(self, name, Called(getattr(self.host, name), groups))
        self.read = Called(self._read, groups)
        self.machine: Any = None  # as the driver knows it
        self.seen = set[int]()
        """All worker processes that there were."""

    def _read(self) -> Any:
        arrived = self.host.read()
        self.seen.update(self.processes())
        if self.gone:
            raise ConnectionError("the machine is lost")
        return arrived

    def processes(self) -> list[int]:
        """Of workers that run."""
        return [pid_of(worker) for worker in list(self.host._workers.values())]

    def hang(self) -> None:
        for threads in self.groups.values():
            threads.submit(self.goes_on.wait)

    def is_noticed(self) -> bool:
        """Whether the driver knows that the machine is lost."""
        channels = [worker.channel for worker in list(self.machine._workers.values())]
        return self.machine.lost and len(select.select(channels, [], [], 0)[0]) == len(channels)

    def end(self) -> None:
        self.seen.update(self.processes())
        self.gone = True
        for process in self.processes():
            os.kill(process, signal.SIGKILL)


def pid_of(worker: Any) -> int:
    return getattr(worker, "pid", None) or worker.process.pid


@contextmanager
def other_hosts(monkeypatch: pytest.MonkeyPatch, count: int, cores: int = 1) -> Iterator[tuple[list[Host], Machines]]:
    """So many machines, and what the driver knows of them."""
    import ray

    monkeypatch.setattr(ray, "get", lambda future, timeout=None: future.result(timeout))
    monkeypatch.setattr(ray, "kill", Host.end)
    monkeypatch.setattr(host, "LOOK_S", 0.2)
    monkeypatch.setattr(cluster, "LOOK_S", 0.2)
    monkeypatch.setattr(cluster, "SILENT_LOOKS", 500)  # hosts answer late where this machine is busy
    hosts = [Host() for _ in range(count)]
    for number, one in enumerate(hosts, 2):
        one.machine = Machine(one, f"10.0.0.{number}", cores)
    machines = Machines([one.machine for one in hosts])
    try:
        yield hosts, machines
    finally:
        machines.close()
        for one in hosts:
            one.goes_on.set()
            for starter in one.host._starters.values():
                if hasattr(starter, "close"):
                    starter.close()
