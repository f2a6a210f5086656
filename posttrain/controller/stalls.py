"""Reports on worker processes that are gone, never started, or stand still while the driver waits for them.

A report on a process that is gone includes what it printed last (`workers.log`). A stopped process (SIGSTOP, Ctrl-Z) is
reported within seconds and ends the run after a time limit. Workers that neither answer nor compute for minutes are
reported, and nothing more: they may wait for a disk or a network. A worker that computes is never reported, however
long it takes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.errors import UserError

_FACT = re.compile(r"^\t(\w+): (\S+)$", re.M)
_MONITORS = "low on memory"  # in Ray's words where its own watch over memory has ended a process
# In Ray's words where a whole machine is lost.
_MACHINES = re.compile(r"node (has|was|is) (died|dead|terminated)|its node|health check", re.I)
# In the words of a rank that could not talk to another.
_TALK = re.compile(r"gloo|nccl|tcpstore|broken pipe|socket|connection (closed|reset|refused|timed out|to )", re.I)
CONTINUES = "The same command continues from the newest checkpoint."


class WorkerDied(UserError):
    """A worker's process is gone."""


# What lowers the memory of workers, of a role and of others.
_SIZES = {"": "trainer.n_workers or the sizes of the batch", "rollout": "actor_rollout_ref.rollout.kv_cache_gb"}


def facts_of(error: Exception) -> dict[str, str]:
    """What Ray says of an actor that is gone: `actor_id`, `pid`, `ip`, as far as it knows."""
    return dict(_FACT.findall(str(error)))


def is_about_a_peer(error: Exception) -> bool:
    """Whether a rank says that it could not talk to another one. The cause may be that the other one is gone."""
    if isinstance(error, UserError):
        return False
    talks = type(error).__name__.startswith("Dist") or isinstance(error, ConnectionError)
    return talks or (isinstance(error, RuntimeError) and _TALK.search(str(error)) is not None)


def death_of(error: Exception, who: str = "", *, rollout: bool = False, printed: str = "") -> WorkerDied:
    """Ray's error in words: who it was, the likely cause, what to do. `printed` says where its output is."""
    text = str(error)
    facts = facts_of(error)
    kind = "A rollout worker" if rollout else "A worker"
    who = who or (f"{kind} (process {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else kind)
    if "creation task" in text:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return WorkerDied(
            f"{who} could not be started: {last.strip()} All machines of a run need the same environment and code."
        )
    if _MACHINES.search(text):
        return WorkerDied(
            f"{who} is lost: its machine no longer answers. It has gone down or was cut off from the network, or Ray "
            f"was ended there. {CONTINUES}"
        )
    cause = "no error of its own ends it so; the kernel does where memory runs out (`dmesg` tells), and kill -9 does"
    if _MONITORS in text:
        cause = "Ray ended it because its machine ran low on memory"
    sizes = _SIZES["rollout" if rollout else ""]
    return WorkerDied(f"{who} died: {cause}. If it was memory, lower {sizes}.{printed} {CONTINUES}")


LOG_NAME = "workers.log"


def printed_lines(files: Sequence[str]) -> list[str]:
    """What a worker has printed to these files of Ray, without Ray's own marks."""
    lines: list[str] = []
    for file in files:
        with suppress(OSError):
            lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line and not line.startswith((":job_id:", ":actor_name:"))]


def append_log(lines: Sequence[str], title: str, folder: Path) -> Path | None:
    """Adds the lines to the log in `folder`, and gives its path; None where nothing was, or could be, written."""
    if not lines:
        return None
    path = folder / LOG_NAME
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write("\n".join([f"--- {title}", *lines]) + "\n")
    except OSError:
        return None
    return path


STOPPED, TRACED = "T", "t"  # by a signal (SIGSTOP, Ctrl-Z); by a debugger
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process of a machine. `started` (ticks after boot) tells it from a later one with its number, and from one of
    another container."""

    pid: int
    started: int


@dataclass(frozen=True)
class State:
    """`letter` as in /proc/PID/stat; `seconds` of processor time, with those of the processes below it."""

    letter: str
    seconds: float


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
    return State(fields[0], used / _TICKS)


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


EVERY_S = 2.0  # between two looks
TELL_S = 10.0  # a process that is stopped for longer is reported
# Workers that neither answer nor compute for longer are reported; then again after twice that time, and so on.
IDLE_S = 300.0
IDLE_SHARE = 0.05  # of a core: a worker's own threads use less than that while it waits
LIMIT = "trainer.stopped_worker_timeout_s"


class WorkerStopped(WorkerDied):
    """A worker's process was stopped for longer than the limit."""


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
        # Capped: after a pause of the driver itself (Ctrl-Z) the time that passed says nothing about the workers.
        passed, self._last = min(now - self._last, 2 * EVERY_S), now
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
            raise WorkerStopped(
                f"{who} has been stopped since {stop.since}, and the run waited {self.limit_s:g} s for it ({LIMIT}). A "
                f"signal (SIGSTOP, Ctrl-Z) holds its process, and the other workers wait for it. {CONTINUES}"
            )
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
        if self._idle >= self._next and waiting:
            self._next *= 2
            self.tell(
                f"note: {', '.join(sorted(waiting))} did not answer since {self._since}, and no worker has computed "
                "anything in that time: they wait for a disk, for the network or for each other. `py-spy dump --pid` "
                f"with the process's number shows where. The run goes on waiting; Ctrl-C ends it. {CONTINUES}"
            )
