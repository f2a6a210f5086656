"""What is said of workers whose processes stand still while the driver waits for them, and when that ends the run.

A stopped process (SIGSTOP, Ctrl-Z) is reported within seconds and ends the run after a time limit. Workers that neither
answer nor compute for minutes are reported, and nothing more: they may wait for a disk or a network. A worker that
computes is never reported, however long it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from posttrain.controller.process_state import STOPPED, TRACED, State
from posttrain.controller.worker_died import CONTINUES, WorkerDied

EVERY_S = 2.0
"""Between two looks."""
TELL_S = 10.0
"""A process that is stopped for longer is reported."""
IDLE_S = 300.0
"""Workers that neither answer nor compute for longer are reported; then again after twice that time, and so on."""
IDLE_SHARE = 0.05
"""Of a core: a worker's own threads use less than that while it waits."""
LIMIT = "trainer.stopped_worker_timeout_s"


class WorkerStopped(WorkerDied):
    """A worker's process was stopped for longer than the limit."""


@dataclass
class _Stop:
    """A process that is stopped."""

    since: str
    seconds: float = 0.0
    told: bool = False


class Standstill:
    """Give it the states of all workers' processes by their names, every `EVERY_S` seconds or so.

    Only time between looks counts, so a driver that was stopped too (Ctrl-Z of the whole run) blames no worker for it.
    """

    def __init__(
        self, limit_s: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s, self.tell, self.clock = limit_s, tell, clock
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
        """`waiting` are those whose answers the driver waits for. Raises WorkerStopped when the limit has passed."""
        now = self.clock()
        passed, self._last = min(now - self._last, 2 * EVERY_S), now
        for who, state in states.items():
            self._look_at_stop(who, state, passed)
        self._look_at_progress(states, waiting, passed)

    def _look_at_stop(self, who: str, state: State | None, passed: float) -> None:
        if state is None or state.letter not in (STOPPED, TRACED):
            stop = self._stops.pop(who, None)
            if stop is not None and stop.told and state is not None:
                self.tell(f"{who} is no longer stopped; the run goes on.")
            return
        stop = self._stops.setdefault(who, _Stop(time.strftime("%H:%M:%S")))
        stop.seconds += passed
        if state.letter == STOPPED and stop.seconds >= self.limit_s:  # under a debugger it may take its time
            raise WorkerStopped(
                f"{who} has been stopped since {stop.since}, and the run waited {self.limit_s:g} s for it ({LIMIT}). A "
                f"signal (SIGSTOP, Ctrl-Z) holds its process, and the other workers wait for it. {CONTINUES}"
            )
        if stop.seconds >= min(TELL_S, self.limit_s / 2) and not stop.told:
            stop.told = True
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
        if computed or self._stops or not used:
            self.answered()
            return
        self._idle += passed
        if self._idle >= self._next and waiting:
            self._next *= 2
            self.tell(
                f"note: {', '.join(sorted(waiting))} did not answer since {self._since}, and no worker has computed "
                "anything in that time: they wait for a disk, for the network or for each other. `py-spy dump --pid` "
                f"with the process's number shows where. The run goes on waiting; Ctrl-C ends it. {CONTINUES}"
            )
