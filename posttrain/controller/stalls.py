"""Reports on worker processes that stand still while the driver waits for them.

A stopped process (SIGSTOP, Ctrl-Z) is reported within seconds and counts as lost after a time limit. Workers that
neither answer nor compute are reported after minutes, and count as hung after a longer limit: until then they may wait
for a disk or a network. A worker that computes is never reported, however long it takes.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.controller.incidents import CONTINUES, WorkerDied

STOPPED, TRACED = "T", "t"  # by a signal (SIGSTOP, Ctrl-Z); by a debugger
_TICKS, _PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """A process of a machine. `started` (ticks after boot) tells it from a later one with its number, and from one of
    another container."""

    pid: int
    started: int


@dataclass(frozen=True)
class State:
    """`letter` as in /proc/PID/stat; `seconds` of processor time, with those of the processes below it; resident
    `memory_gb`."""

    letter: str
    seconds: float
    memory_gb: float = 0.0


def this_process() -> Process:
    """`started` is 0 where the kernel does not say it."""
    fields = _stat(os.getpid())
    return Process(os.getpid(), int(fields[19]) if fields else 0)


def state_of(process: Process) -> State | None:
    """None where it is gone, or where nothing is known of it."""
    fields = _stat(process.pid)
    if not fields or int(fields[19]) != process.started:
        return None
    used = sum(_ticks(pid) for pid in _process_tree(process.pid))
    return State(fields[0], used / _TICKS, int(fields[21]) * _PAGE / 1e9)


def _stat(pid: int) -> list[str]:
    # Fields after the process's name, which may itself hold spaces and brackets: state, parent, ...
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _ticks(pid: int) -> int:
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) if fields else 0  # its own, and those of children that have ended


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = children.read_text().split()
        except OSError:  # that thread has ended
            continue
        for child in below:
            yield from _process_tree(int(child))


def starting_states() -> dict[str, State]:
    """By name, the processes that the Ray of this process has started for workers, as far as this machine has them. A
    worker that is stopped before it could report its process is among them."""
    found = {}
    for pid in _process_tree(os.getpid()):
        with suppress(OSError):
            is_rays = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
            fields = _stat(pid)
            state = state_of(Process(pid, int(fields[19]))) if is_rays and fields else None
            if state is not None:
                found[f"A worker that starts (process {pid} on {socket.gethostname()})"] = state
    return found


STACK_SIGNAL = signal.SIGUSR2  # has a rank print the stacks of its threads, also while it waits inside C code
DUMP_S = 2.0


def dump_stacks(process: Process, file: str) -> str:
    """What a rank's threads do now: it prints that to `file`, at a signal. Empty where it cannot."""
    state = state_of(process)
    if state is None or state.letter in (STOPPED, TRACED):
        return ""
    try:
        before = os.path.getsize(file)
        os.kill(process.pid, STACK_SIGNAL)
        until, found = time.monotonic() + DUMP_S, b""
        while time.monotonic() < until:
            time.sleep(0.05)
            with open(file, "rb") as printed:
                printed.seek(before)
                longer = printed.read()
            if longer and longer == found:  # nothing was added since the last look
                break
            found = longer
    except OSError:
        return ""
    return found.decode(errors="replace").strip()


EVERY_S = 2.0  # between two looks
TELL_S = 10.0  # a process that is stopped for longer is reported
# Workers that neither answer nor compute for longer are reported; then again after twice that time, and so on.
IDLE_S = 300.0
IDLE_SHARE = 0.05  # of a core: a worker's own threads use less than that while it waits
LIMIT, HUNG_LIMIT = "trainer.stopped_worker_timeout_s", "trainer.hung_worker_timeout_s"


class WorkerStopped(WorkerDied):
    """A worker's process was stopped for longer than the limit."""

    what = "was stopped"


class WorkersHung(WorkerDied):
    """For longer than the limit no worker has answered or computed anything."""

    what = "hung"


@dataclass
class _Stop:
    since: str
    seconds: float = 0.0
    reported: bool = False


class StallWatch:
    """Give it the states of all workers' processes by their names, every `EVERY_S` seconds or so.

    Only time between looks counts, so a driver that was stopped too (Ctrl-Z of the whole run) blames no worker for it.
    """

    def __init__(
        self,
        limit_s: float,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        hung_s: float = math.inf,
    ) -> None:
        self.limit_s, self.tell, self.clock, self.hung_s = limit_s, tell, clock, hung_s
        self._last = clock()
        self._stops: dict[str, _Stop] = {}
        self._used: dict[str, float] = {}
        self.answered()

    def is_due(self) -> bool:
        return self.clock() - self._last >= EVERY_S

    def answered(self) -> None:
        """A worker has answered: the run goes on."""
        self._idle, self._next, self._since = 0.0, IDLE_S, time.strftime("%H:%M:%S")

    def look(self, states: Mapping[str, State | None], waiting: Collection[str]) -> None:
        """`waiting` are those whose answers the driver waits for. Raises WorkerStopped or WorkersHung when the limit
        has passed."""
        now = self.clock()
        # Capped: after a pause of the driver itself (Ctrl-Z) the time that passed says nothing about the workers.
        passed, self._last = min(now - self._last, 2 * EVERY_S), now
        # Without those of workers that were replaced: `_look_at_progress` waits while any is stopped.
        self._stops = {who: stop for who, stop in self._stops.items() if who in states}
        for who, state in states.items():
            self._look_at_stop(who, state, passed)
        self._look_at_progress(states, waiting, passed)

    def _look_at_stop(self, who: str, state: State | None, passed: float) -> None:
        if state is None or state.letter not in (STOPPED, TRACED):
            stop = self._stops.pop(who, None)
            if stop is not None and stop.reported and state is not None:
                self.tell(f"{who} is no longer stopped; the run goes on.")
            return
        stop = self._stops.setdefault(who, _Stop(time.strftime("%H:%M:%S")))
        stop.seconds += passed
        if state.letter == STOPPED and stop.seconds >= self.limit_s:  # under a debugger it may take its time
            stopped = WorkerStopped(
                f"{who} has been stopped since {stop.since}, and the run waited {self.limit_s:g} s for it ({LIMIT}). A "
                f"signal (SIGSTOP, Ctrl-Z) holds its process, and the other workers wait for it. {CONTINUES}"
            )
            stopped.who = who
            raise stopped
        if stop.seconds >= min(TELL_S, self.limit_s / 2) and not stop.reported:
            stop.reported = True
            self.tell(f"note: {who} has been stopped since {stop.since}: {self._remedy(state)}")

    def _remedy(self, state: State) -> str:
        if state.letter == TRACED:
            return "a debugger holds its process. The run waits until it lets go."
        return (
            f"a signal (SIGSTOP, Ctrl-Z) holds its process. `kill -CONT` with its number, on its machine, lets it go "
            f"on; otherwise the run ends when it has waited {self.limit_s:g} s ({LIMIT})."
        )

    def _look_at_progress(self, states: Mapping[str, State | None], waiting: Collection[str], passed: float) -> None:
        used = {who: state.seconds for who, state in states.items() if state is not None}
        computed = any(now - self._used.get(who, now) > IDLE_SHARE * passed for who, now in used.items())
        self._used = used
        # One rank that computes is progress for all: the others may wait for it in a collective.
        if computed or self._stops or not used:
            self.answered()
            return
        self._idle += passed
        if self._idle >= self.hung_s and waiting:
            hung = WorkersHung(
                f"{', '.join(sorted(waiting))} did not answer since {self._since}, and no worker has computed anything "
                f"for {self.hung_s:g} s ({HUNG_LIMIT}): they wait for a disk, for the network or for each other. "
                f"{CONTINUES}"
            )
            hung.who = ", ".join(sorted(waiting))
            raise hung
        if self._idle >= self._next and waiting:
            self._next *= 2
            self.tell(
                f"note: {', '.join(sorted(waiting))} did not answer since {self._since}, and no worker has computed "
                "anything in that time: they wait for a disk, for the network or for each other. `py-spy dump --pid` "
                f"with the process's number shows where. The run goes on waiting{self._until_hung()}; Ctrl-C ends it. "
                f"{CONTINUES}"
            )

    def _until_hung(self) -> str:
        return f", up to {self.hung_s:g} s ({HUNG_LIMIT})" if math.isfinite(self.hung_s) else ""
