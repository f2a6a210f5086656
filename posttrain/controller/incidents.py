"""A worker that died, stands still, or never started: the error, what is known of it, and what it printed last.

`StallWatch` reports processes that stand still while the driver waits for them. A stopped process (SIGSTOP, Ctrl-Z) is
reported within seconds and counts as lost after a time limit. Workers that neither answer nor compute are reported
after minutes, and count as hung after a longer limit: until then they may wait for a disk or a network. A worker that
computes is never reported, however long it takes.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.errors import UserError

_FACT = re.compile(r"^\t(\w+): (\S+)$", re.M)
_MONITORS = "low on memory"  # in Ray's words where its own watch over memory has ended a process
# In Ray's words where a whole machine is lost.
_MACHINES = re.compile(r"node (has|was|is) (died|dead|terminated)|its node|health check", re.I)
# In the words of a rank that could not talk to another.
_TALK = re.compile(r"gloo|nccl|tcpstore|broken pipe|socket|connection (closed|reset|refused|timed out|to )", re.I)
CONTINUES = "The same command continues from the newest checkpoint."


@dataclass
class Incident:
    """What was known of the workers when one of them was lost; one page of the run directory."""

    who: str
    calls: Mapping[str, str] = field(default_factory=dict)  # by worker, the last method that it was asked for
    states: Mapping[str, str] = field(default_factory=dict)  # by worker, its process in words
    stacks: Mapping[str, str] = field(default_factory=dict)  # of the workers that are left
    printed: Sequence[str] = ()  # its last lines


class WorkerDied(UserError):
    """A worker's process is gone, or does not go on."""

    what = "died"
    who = ""
    worker = ""  # the rank's name where one alone was lost: `rank 0`, `rollout 1`, `reward_model 0`
    incident: Incident | None = None  # what was known at that moment
    # Whether new workers would meet the same end. Then the run is not continued by itself.
    recurs = False


class PeerLost(WorkerDied):
    """A worker could not reach another, or its results; which one is lost is known only if Ray reports it."""

    what = "lost its connection"


class NoRoom(UserError):
    """Ray had no room for the workers of the run within the time given."""

    machines = 0  # on which the run could still train


# What lowers the memory of workers, of a role and of others.
_SIZES = {
    "": "trainer.n_workers or the sizes of the batch",
    "rollout": "actor_rollout_ref.rollout.kv_cache_gb",
    "reward_model": "reward_model.forward_max_token_len_per_gpu",
    "critic": "critic.ppo_max_token_len_per_gpu",
    "reference": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
}


def facts_of(error: Exception) -> dict[str, str]:
    """What Ray says of an actor that is gone: `actor_id`, `pid`, `ip`, as far as it knows."""
    return dict(_FACT.findall(str(error)))


def is_about_a_peer(error: Exception) -> bool:
    """Whether a rank says that it could not reach another one. The cause may be that the other one is gone."""
    if isinstance(error, UserError):
        return isinstance(error, PeerLost)
    talks = type(error).__name__.startswith("Dist") or isinstance(error, ConnectionError)
    return talks or (isinstance(error, RuntimeError) and _TALK.search(str(error)) is not None)


def death_of(error: Exception, who: str = "", *, role: str = "rank", printed: str = "") -> WorkerDied:
    """Ray's error in words: who it was, the likely cause, what to do. `role` is its role, where it has that one alone;
    `printed` says where its output is."""
    text = str(error)
    facts = facts_of(error)
    kind = "A worker" if role == "rank" else f"A {role.replace('_', ' ')} worker"
    who = who or (f"{kind} (process {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else kind)
    if "creation task" in text:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return _recurring(
            f"{who} could not be started: {last.strip()} All machines of a run need the same environment and code."
        )
    if _MACHINES.search(text):
        return WorkerDied(
            f"{who} is lost: its machine no longer answers. It has gone down or was cut off from the network, or Ray "
            f"was ended there. {CONTINUES}"
        )
    sizes = _SIZES.get(role, _SIZES[""])
    if _MONITORS in text:
        cause = "Ray ended it because its machine ran low on memory"
        return _recurring(f"{who} died: {cause}. If it was memory, lower {sizes}.{printed} {CONTINUES}")
    cause = "no error of its own ends it so; the kernel does where memory runs out (`dmesg` tells), and kill -9 does"
    return WorkerDied(f"{who} died: {cause}. If it was memory, lower {sizes}.{printed} {CONTINUES}")


def _recurring(text: str) -> WorkerDied:
    death = WorkerDied(text)
    death.recurs = True
    return death


LOG_NAME = "workers.log"


def printed_lines(files: Sequence[str]) -> list[str]:
    """What a worker has printed to these files of Ray, without Ray's own marks."""
    lines: list[str] = []
    for file in files:
        with suppress(OSError):
            lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    return without_marks(lines)


def without_marks(lines: Sequence[str]) -> list[str]:
    """Lines of Ray's files without those that Ray itself writes."""
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
