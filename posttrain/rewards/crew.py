"""The worker processes of a RewardPool: starts and ends them, hands them tasks in chunks, and reads their answers.

`WorkerProcess` is one worker as its parent sees it: a process in its own group, a connection to it, and a reliable end.
`Crew` replaces those that fail. The failing task is always known: answers arrive in the order of a chunk's tasks, and
those of a dead worker are still in its channel, so it was working on the first task without an answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from posttrain.machines.channel import SEND_S, Channel
from posttrain.machines.cluster import Places
from posttrain.machines.host import End
from posttrain.machines.spawn import spawn
from posttrain.rewards.types import CHUNK, CHUNK_S, Outcome, Payload, RewardError, RewardSpec, failure

# Seconds that importing the user's file may take.
IMPORT_S = 120.0


class WorkerProcess:
    """A running `posttrain.rewards.worker` with its reward; it sends ("ready", spec) or ("failed", what, todo)."""

    machine = None  # the driver's
    where = ""  # the address of another machine
    shares_clock = True  # whether its times can be compared with ours

    def __init__(self, spec: RewardSpec) -> None:
        ours, theirs = socket.socketpair()
        self.process = spawn("from posttrain.rewards.worker import serve; serve()", theirs)
        _send_to_guardian(f"+{self.process.pid}\n")
        theirs.close()
        self.channel = Channel(ours, send_s=SEND_S)
        with contextlib.suppress(OSError):  # a worker that is already dead is noticed when it is read
            self.channel.send(spec)

    def wait_until_ready(self, seconds: float) -> RewardSpec:
        """Return the spec as completed by the worker; RewardError if it failed, died or took too long."""
        end = time.monotonic() + seconds
        while wait([self.channel.fileno()], max(0.0, end - time.monotonic())):
            for kind, *rest in self.channel.receive():
                if kind == "print":
                    print(rest[0])
                elif kind == "failed":
                    raise RewardError(rest[0], todo=rest[1])
                elif kind == "ready":
                    return rest[0]
            if self.channel.broken:
                raise RewardError(
                    "what a worker sent while it imported the reward could not be read",
                    todo="the file must not write into file descriptors that it did not open",
                )
            if self.channel.ended:
                raise RewardError(
                    f"a worker ended ({self.exit_text()}) while it imported the reward",
                    todo="run the file alone with python; it must be importable",
                )
        raise RewardError(
            f"importing the reward took longer than {seconds:g} s", todo="move slow work out of the file's top level"
        )

    def exit_text(self) -> str:
        """Say how the process ended: `exit code 3`, `killed by SIGSEGV`."""
        try:
            code = self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        hint = ", perhaps because the machine ran out of memory" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) holds it."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[:1] == ["T"]

    def was_killed(self) -> bool:
        """Whether it ended by SIGKILL, which the kernel sends when memory is short."""
        return self.process.poll() == -signal.SIGKILL

    def ended(self) -> End:
        return End(self.exit_text(), self.was_killed())

    def kill(self) -> None:
        """End the process and whatever it started, and wait for it."""
        # Before wait(): until then the group's number cannot be reused.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.process.returncode is None:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _send_to_guardian(f"-{self.process.pid}\n")  # it has ended, and its number may be reused by others
        self.channel.close()


# The guardian is a process that outlives the run by a moment, to end what reward workers have started. The kernel kills
# a worker when the trainer dies, but not the programs that a reward function started. The guardian reads every worker's
# process group from a pipe; when the pipe closes, however the trainer ended, it kills the groups not released.
# A program that leaves its group (by setsid) escapes.
_GUARDIAN = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line[1:])
    (groups.add if line[0] == "+" else groups.discard)(group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_lock = threading.Lock()
_owner: int | None = None
_pipe: int | None = None


def _send_to_guardian(line: str) -> None:
    global _owner, _pipe
    with _lock:
        if _pipe is None or _owner != os.getpid():  # a forked child has its own workers, and its own guardian
            _pipe, _owner = _start_guardian(), os.getpid()
        # If the guardian was killed too, the kernel still ends the workers themselves.
        with contextlib.suppress(OSError):
            os.write(_pipe, line.encode())


def _start_guardian() -> int:
    theirs, ours = os.pipe()  # no other child inherits either end, so the pipe closes when the trainer ends
    try:
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
    finally:
        os.close(theirs)
    return ours


# Answers to tasks quicker than this are collected: waking up for each would cost more than scoring it.
_QUICK_S = 0.0005
# The longest pause for collecting them.
_PAUSE_S = 0.005
# Less work than this is not worth waking a second worker.
_TRIFLE_S = 0.002
# If this many workers in a row die before they could work, the reward cannot be loaded.
_USELESS_DEATHS = 3
_ENDED = "the worker process ended"
_NONSENSE = "what the worker process sent could not be read: something else writes into its connection"


@dataclass(slots=True)
class Task:
    """One call of the reward function: a response, or a group of them."""

    number: int
    keys: list[Hashable]
    payloads: list[Payload]
    # How long the call took; None if it did not return.
    seconds: float | None = None
    # Its worker was killed or stopped from outside, perhaps before it began. It gets one second try.
    killed_once: bool = False


@dataclass
class _Worker:
    handle: Any  # a WorkerProcess, or a RemoteWorker, which looks like one
    deadline: float
    ready: bool = False
    warm: bool = False
    pending: deque[Task] = field(default_factory=deque)
    complaint: RewardError | None = None
    # Why it must be replaced although it may be alive.
    fault: str | None = None
    # Its last score changed what the next one needs. It is replaced, and no task is to blame.
    damaged: bool = False


class Crew:
    """The workers of a pool, used by one thread only. Tasks go into `backlog`; `work` returns those that are done."""

    def __init__(
        self,
        spec: RewardSpec,
        size: int,
        timeout_s: float,
        on_print: Callable[[str], Any],
        first: WorkerProcess | None = None,
    ) -> None:
        self.backlog: deque[Task] = deque()
        self._spec, self._timeout, self._on_print = spec, timeout_s, on_print
        self.places = Places(self.start_here, size)
        self._workers = [_Worker(first, 0.0, ready=True)] if first else []
        self._done: list[tuple[Task, list[Outcome]]] = []
        self._useless_deaths, self._lost_idle = 0, False
        self._reported: set[str] = set()
        self._task_s: float | None = None

    def work(self, wake: int) -> list[tuple[Task, list[Outcome]]]:
        """Hand out tasks, and wait until a worker sends something, a deadline passes or `wake` can be read."""
        # A worker that died idle (the kernel picks one when memory is short) is replaced when there is work for it.
        while len(self._workers) < self.places.room and (self.backlog or not self._lost_idle):
            started = self.places.start(worker.handle for worker in self._workers)
            self._workers.append(_Worker(started, time.monotonic() + IMPORT_S))
        self._lost_idle = self._lost_idle and len(self._workers) < self.places.room
        self._hand_out()
        self._let_answers_accumulate()
        self._wait_for_messages(wake)
        self._enforce_deadlines()
        done, self._done = self._done, []
        return done

    def start_here(self) -> WorkerProcess:
        """A worker on this machine."""
        return WorkerProcess(self._spec)

    def end(self) -> None:
        for worker in self._workers:
            worker.handle.kill()

    def _hand_out(self) -> None:
        # Only idle workers get a chunk: they are reading, so that sending cannot block.
        idle = [worker for worker in self._workers if worker.ready and not worker.pending]
        for place, worker in enumerate(idle):
            if not self.backlog:
                return
            size = self._chunk_size(len(idle) - place, len(self.backlog))
            worker.pending.extend(self.backlog.popleft() for _ in range(size))
            worker.deadline = time.monotonic() + self._timeout
            try:
                worker.handle.channel.send([(task.number, task.payloads) for task in worker.pending])
            except OSError:
                self._replace_worker(worker, "the worker process hung up", blame=False)

    def _chunk_size(self, idle: int, waiting: int) -> int:
        # An equal share, unless that is too little or too long; tasks of slow functions are handed out one by one.
        if self._task_s is None:
            return 1
        task_s = max(self._task_s, 1e-6)
        share = -(-waiting // (idle if self._quick() else self.places.room))
        most = max(1, min(CHUNK, int(CHUNK_S / task_s), waiting))
        return min(most, max(share, int(_TRIFLE_S / task_s)))

    def _let_answers_accumulate(self) -> None:
        # Sleep while quick tasks run, until the first worker may need more.
        busy = [worker for worker in self._workers if worker.pending]
        if busy and self._task_s is not None and self._quick():
            work = self._task_s * min(len(worker.pending) for worker in busy)
            left = min(worker.deadline for worker in busy) - time.monotonic()
            time.sleep(max(0.0, min(_PAUSE_S, work, left)))

    def _quick(self) -> bool:
        return self._task_s is not None and self._task_s < _QUICK_S

    def _wait_for_messages(self, wake: int) -> None:
        channels: dict[Any, _Worker] = {worker.handle.channel: worker for worker in self._workers}
        busy = [worker.deadline for worker in self._workers if worker.pending or not worker.ready]
        seconds = max(0.0, min(busy) - time.monotonic()) if busy else None
        for source in wait([*channels, wake], seconds):
            if source != wake and not self._receive(channels[source]):
                worker = channels[source]
                reason = worker.fault or f"the worker process ended ({worker.handle.exit_text()})"
                self._replace_worker(worker, reason, blame=not (worker.damaged or self._gets_second_try(worker)))

    def _gets_second_try(self, worker: _Worker) -> bool:
        # The kernel may have killed an idle worker just when it got work. A faulty task fails again.
        lost = worker.handle.was_killed() or worker.handle.is_stopped()
        if lost and not self.places.has(worker.handle.machine):
            return True  # with its machine: whether the task was running is not known
        if not worker.pending or not lost or worker.pending[0].killed_once:
            return False
        worker.pending[0].killed_once = True
        return True

    def _receive(self, worker: _Worker) -> bool:
        # False if the worker is gone or must be replaced.
        channel = worker.handle.channel
        for message in channel.receive():
            if not self._handle(worker, message):
                worker.fault = _NONSENSE
                return False
            if worker.complaint is not None or worker.damaged:
                return False
        worker.fault = _NONSENSE if channel.broken else None
        return not (channel.ended or channel.broken)

    def _handle(self, worker: _Worker, message: Any) -> bool:
        # False if it is no message that a worker sends.
        match message:
            case ("done", int(number), [*outcomes], float(start), float(end)):
                return self._accept_answer(worker, number, outcomes, start, end)
            case ("print", str(line)):
                if worker.ready:  # what the import prints was already shown when the reward was resolved
                    self._print(line)
            case ("wait", float(seconds)):
                worker.deadline = time.monotonic() + seconds + self._timeout
            case ("back", float(seconds)):
                self._task_s = seconds
                self._give_back(worker)
            case ("damage", str(lasting), str(repaired)):
                worker.damaged, worker.fault = bool(lasting), _ENDED if lasting else None
                self._report_damage(lasting, repaired)
            case ("ready", _):
                worker.ready = True
            case ("failed", str(what), str(todo)):
                where = "reward.functions" if self._spec.kind == "combined" else "custom_reward_function"
                machine = f" (on {worker.handle.where})" if worker.handle.where else ""
                worker.complaint = RewardError(what + machine, where, todo)
            case _:
                return False
        return True

    def _accept_answer(self, worker: _Worker, number: int, outcomes: list[Outcome], start: float, end: float) -> bool:
        # False if it is no answer to the worker's first task.
        expected = worker.pending[0] if worker.pending else None
        if expected is None or expected.number != number or len(outcomes) != len(expected.keys):
            return False
        task = worker.pending.popleft()
        task.seconds = end - start
        # By the worker's clock, which is also ours on one machine: the answer may have waited in the channel.
        worker.deadline = (end if worker.handle.shares_clock else time.monotonic()) + self._timeout
        if worker.warm:  # the first task may have imported something, so its time says nothing about the next
            seconds = end - start
            known = seconds if self._task_s is None else self._task_s
            # Capped, because a task may only have been interrupted.
            self._task_s = 0.9 * known + 0.1 * min(seconds, 10 * known)
        worker.warm = True
        self._finish(task, outcomes)
        return True

    def _finish(self, task: Task, outcomes: list[Outcome]) -> None:
        self._useless_deaths = 0
        self._done.append((task, outcomes))

    def _give_back(self, worker: _Worker) -> None:
        self.backlog.extendleft(reversed(worker.pending))
        worker.pending.clear()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            if not worker.ready:
                self._replace_worker(worker, f"it did not start within {IMPORT_S:g} s")
            elif worker.pending:
                slow = worker.pending[0]
                alive = self._receive(worker)  # the answer may have arrived just now
                if worker.damaged:
                    self._replace_worker(worker, _ENDED, blame=False)
                elif worker.pending and worker.pending[0] is slow:
                    reason = f"took longer than {self._timeout:g} s" if alive else worker.fault or _ENDED
                    self._replace_worker(worker, reason, blame=not self._gets_second_try(worker))

    def _replace_worker(self, worker: _Worker, reason: str, *, blame: bool = True) -> None:
        # The first task fails with `reason` if it is to blame; the others return to the front of the backlog.
        worker.handle.kill()
        self._workers.remove(worker)
        if blame and worker.pending:
            task = worker.pending.popleft()
            self._finish(task, [failure(reason)] * len(task.keys))
        elif worker.ready and (worker.damaged or not worker.pending):
            self._lost_idle = True
        elif self.places.has(worker.handle.machine):  # otherwise the machine was lost: the reward is not to blame
            self._useless_deaths += 1
            # Workers that were ready may all have died at once, at the moment they got work.
            if self._useless_deaths >= _USELESS_DEATHS + worker.ready * self.places.room:
                raise worker.complaint or RewardError(
                    f"{_USELESS_DEATHS} reward workers in a row were lost, the last because {reason}",
                    self._spec.label,
                    "run the reward's file alone with python; look for exits, memory limits and slow imports",
                )
        self._give_back(worker)

    def _report_damage(self, lasting: str, repaired: str) -> None:
        # Once per kind of change: a thousand scores would print it a thousand times.
        label = self._spec.label
        if lasting and "lasting" not in self._reported:
            self._reported.add("lasting")
            self._print(
                f"note: the reward {label} replaced {lasting} while it scored. Other scores of the same worker process "
                "would be wrong, so each worker is replaced after such a score, which takes time. Let the function "
                "put back what it changes, or run what changes it in a process of its own."
            )
        if repaired and "repaired" not in self._reported:
            self._reported.add("repaired")
            self._print(
                f"note: the reward {label} changed {repaired} while it scored; it is put back after each score."
            )

    def _print(self, line: str) -> None:
        try:
            self._on_print(line)
        except Exception as error:  # a bug of the caller's callback, in our thread: report it and go on scoring
            print(f"on_print failed: {error!r}")
