"""On another machine of a run's Ray: starts worker processes there, as the driver does on its own machine.

A `MachineHost` is a Ray actor, one per machine. It passes bytes between its worker processes and the driver. Messages
travel in Ray's calls, which Ray protects by its token; no further port is opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from posttrain import cores
from posttrain.errors import first_line
from posttrain.machines.channel import Channel, Relay, Wake

LOOK_S = 10.0  # then an answer without content, so that a host whose driver is gone can end


@dataclass(frozen=True)
class End:
    """How a worker process ended."""

    text: str
    """For messages: `exit code 3`."""
    killed: bool = False
    """Whether by SIGKILL, which the kernel sends when memory is short."""
    running: frozenset[int] | None = frozenset()
    """Of the conversations in it, those whose code was running (`Mark.place`). None: it is not to blame, because its
    machine was lost, or could not start it."""
    started: bool = True
    """Whether there was a process."""


Arrived = list[tuple[int, bytes, End | None]]
"""(worker, what it wrote, how it ended)."""


class WorkerProcess(Protocol):
    """A worker process as its user sees it."""

    channel: Channel
    machine: Any
    """Where it runs: a `Machine`; None is the driver's."""

    def ended(self) -> End:
        """How it ended. Ask it after its channel has ended, or after `kill`."""
        ...

    def kill(self) -> None:
        """Ends the process and whatever it started."""
        ...


class Starter(Protocol):
    """Starts worker processes of one kind."""

    def start(self) -> WorkerProcess: ...


class MachineHost:
    """Becomes a Ray actor. Calls for workers come one after the other. `read` runs beside them, and so does `prepare`:
    the user's files that it loads may hang."""

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        with contextlib.suppress(OSError):  # relative paths of the settings are those of the command
            os.chdir(folder)
        # What a worker finds on the driver's machine it finds here: keys of judges, settings. What this machine has
        # set itself stays.
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        self._starters: dict[str, Starter] = {}
        self._workers: dict[int, WorkerProcess] = {}
        self._relays: dict[int, Relay] = {}
        self._arrived: Arrived = []
        self._wake = Wake()
        self._lock = threading.Lock()  # a socket that is closed while it is read could be another worker's by then

    def cores(self) -> int:
        """Cores that may be used."""
        return cores.usable()

    def prepare(self, kind: str, make: Callable[[], Starter]) -> str:
        """Makes ready to start workers of a kind; gives why that cannot be done here, or an empty text."""
        try:
            self._starters[kind] = make()
        except Exception as error:
            return str(error) or type(error).__name__
        return ""

    def printed(self) -> list[str]:
        """What this process and its workers have printed into Ray's files here: all that bypasses a worker's own
        streams, such as the last words of one that crashed."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            for file in dict.fromkeys(os.readlink(f"/proc/self/fd/{stream}") for stream in (1, 2)):
                if os.path.isfile(file):
                    lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        return lines

    def start(self, number: int, kind: str) -> None:
        with self._lock:
            try:
                worker = self._starters[kind].start()
            except Exception as error:
                end = End(first_line(error), killed=True, running=None, started=False)
                self._arrived.append((number, b"", end))
            else:
                self._workers[number], self._relays[number] = worker, Relay(worker.channel.socket)
        self._wake.set()

    def write(self, number: int, data: bytes) -> None:
        relay = self._relays.get(number)
        if relay is not None:
            relay.write(data)
            if relay.has_more:
                self._wake.set()

    def kill(self, number: int) -> None:
        with self._lock:
            self._end(number, kill=True)
        self._wake.set()

    def is_stopped(self, number: int) -> bool:
        """Whether a signal has stopped a worker."""
        with self._lock:
            worker: Any = self._workers.get(number)  # of rewards: others are not asked for it
            return worker is not None and worker.is_stopped()

    def read(self) -> Arrived:
        """What workers have written, and which have ended, as soon as there is something."""
        relays = dict(self._relays)
        numbers = {relay: number for number, relay in relays.items()}
        ready = [] if self._arrived else self._wake.wait(relays.values(), LOOK_S)
        with self._lock:
            for relay in ready:
                if self._relays.get(numbers[relay]) is relay:  # otherwise it was killed meanwhile
                    self._pass_on(numbers[relay], relay)
            arrived, self._arrived = self._arrived, []
        return arrived

    def _pass_on(self, number: int, relay: Relay) -> None:
        relay.write()
        data = relay.read()
        if data:
            self._arrived.append((number, data, None))
        elif data is not None:
            self._end(number)

    def _end(self, number: int, *, kill: bool = False) -> None:
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        relay = self._relays.pop(number)
        if kill:
            relay.close_by(worker.kill)
        self._arrived.append((number, b"", worker.ended()))
        relay.close_by(worker.kill)  # and what it has started
