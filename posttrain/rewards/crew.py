"""Crew: the worker processes of a RewardPool. Hands them tasks in chunks, hears them, and replaces those that fail.

A task is blamed exactly: answers come in the order of a chunk's tasks, and those of a worker that is gone still lie in
its channel, so the first task without one is the one it was at.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from posttrain.rewards.channel import CHUNK, CHUNK_S, Payload
from posttrain.rewards.loading import IMPORT_S
from posttrain.rewards.outcomes import Outcome, failure
from posttrain.rewards.process import WorkerProcess
from posttrain.rewards.types import RewardError, RewardSpec

_QUICK_S = 0.0005
"""Answers of tasks below this are taken together: to wake up for each would cost more than to score it."""
_PAUSE_S = 0.005
"""For how long they are left to gather at most."""
_TRIFLE_S = 0.002
"""Work that is not worth the waking of a second worker."""
_USELESS_DEATHS = 3
"""Workers that may die in a row before they could work: the reward cannot be loaded."""
_ENDED = "the worker process ended"
_NONSENSE = "what the worker process sent could not be read: something else writes into its connection"


@dataclass(slots=True)
class Task:
    """One call of the reward function: a response, or a group of them."""

    number: int
    keys: list[Hashable]
    payloads: list[Payload]
    seconds: float | None = None
    """How long the call took; None where it did not come back."""
    killed_once: bool = False
    """Its worker was killed from outside, perhaps before it began: it gets another one, once."""


@dataclass
class _Worker:
    handle: WorkerProcess
    deadline: float
    ready: bool = False
    warm: bool = False
    pending: deque[Task] = field(default_factory=deque)
    complaint: RewardError | None = None
    fault: str | None = None
    """Why it must be replaced although it may live."""
    damaged: bool = False
    """Whether its last score changed what the next would need: it is replaced, and no task is to blame."""


class Crew:
    """Used by one thread alone. Tasks go into `backlog`; `work` gives those that are done."""

    def __init__(
        self,
        spec: RewardSpec,
        size: int,
        timeout_s: float,
        on_print: Callable[[str], Any],
        first: WorkerProcess | None = None,
    ) -> None:
        self.backlog: deque[Task] = deque()
        self._spec, self._size, self._timeout, self._on_print = spec, size, timeout_s, on_print
        self._workers = [_Worker(first, 0.0, ready=True)] if first else []
        self._done: list[tuple[Task, list[Outcome]]] = []
        self._useless_deaths, self._lost_idle = 0, False
        self._told: set[str] = set()
        self._task_s: float | None = None

    def work(self, wake: int) -> list[tuple[Task, list[Outcome]]]:
        """Hand out, and wait until a worker has something to say, a deadline passes or `wake` can be read."""
        # A worker that died idle (the kernel's choice when memory was short) is replaced when there is work for it.
        while len(self._workers) < self._size and (self.backlog or not self._lost_idle):
            self._workers.append(_Worker(WorkerProcess(self._spec), time.monotonic() + IMPORT_S))
        self._lost_idle = self._lost_idle and len(self._workers) < self._size
        self._hand_out()
        self._let_answers_gather()
        self._listen(wake)
        self._enforce_deadlines()
        done, self._done = self._done, []
        return done

    def end(self) -> None:
        for worker in self._workers:
            worker.handle.kill()

    def _hand_out(self) -> None:
        """Give idle workers a chunk each. Only idle ones: they are reading, so that sending cannot block."""
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
                self._bury(worker, "the worker process hung up", blame=False)

    def _chunk_size(self, idle: int, waiting: int) -> int:
        """An equal share, if it is neither trifling nor long; slow functions are spread one by one over the workers."""
        if self._task_s is None:
            return 1
        task_s = max(self._task_s, 1e-6)
        share = -(-waiting // (idle if self._quick() else self._size))
        most = max(1, min(CHUNK, int(CHUNK_S / task_s), waiting))
        return min(most, max(share, int(_TRIFLE_S / task_s)))

    def _let_answers_gather(self) -> None:
        """Sleep while quick tasks are at work, until the first worker may need more."""
        busy = [worker for worker in self._workers if worker.pending]
        if busy and self._task_s is not None and self._quick():
            work = self._task_s * min(len(worker.pending) for worker in busy)
            left = min(worker.deadline for worker in busy) - time.monotonic()
            time.sleep(max(0.0, min(_PAUSE_S, work, left)))

    def _quick(self) -> bool:
        return self._task_s is not None and self._task_s < _QUICK_S

    def _listen(self, wake: int) -> None:
        channels: dict[Any, _Worker] = {worker.handle.channel: worker for worker in self._workers}
        busy = [worker.deadline for worker in self._workers if worker.pending or not worker.ready]
        seconds = max(0.0, min(busy) - time.monotonic()) if busy else None
        for source in wait([*channels, wake], seconds):
            if source != wake and not self._hear(channels[source]):
                worker = channels[source]
                reason = worker.fault or f"the worker process ended ({worker.handle.exit_text()})"
                self._bury(worker, reason, blame=not (worker.damaged or self._spared(worker)))

    def _spared(self, worker: _Worker) -> bool:
        """Whether a worker's first task gets another one, as the kernel may have killed an idle worker in the moment in
        which it was given work. A task that is at fault itself is found out with the second."""
        if not worker.pending or not worker.handle.was_killed() or worker.pending[0].killed_once:
            return False
        worker.pending[0].killed_once = True
        return True

    def _hear(self, worker: _Worker) -> bool:
        """Take in what a worker has said; False when it is gone or must go."""
        channel = worker.handle.channel
        for message in channel.receive():
            if not self._heed(worker, message):
                worker.fault = _NONSENSE
                return False
            if worker.complaint is not None or worker.damaged:
                return False
        worker.fault = _NONSENSE if channel.broken else None
        return not (channel.ended or channel.broken)

    def _heed(self, worker: _Worker, message: Any) -> bool:
        """Do what a message asks; False if it is none of those that a worker sends."""
        match message:
            case ("done", int(number), [*outcomes], float(start), float(end)):
                return self._take(worker, number, outcomes, start, end)
            case ("print", str(line)):
                if worker.ready:  # what the import prints was shown when the reward was resolved
                    self._print(line)
            case ("wait", float(seconds)):
                worker.deadline = time.monotonic() + seconds + self._timeout
            case ("back", float(seconds)):
                self._task_s = seconds
                self._give_back(worker)
            case ("damage", str(lasting), str(repaired)):
                worker.damaged, worker.fault = bool(lasting), _ENDED if lasting else None
                self._tell_of_damage(lasting, repaired)
            case ("ready", _):
                worker.ready = True
            case ("failed", str(what), str(todo)):
                where = "reward.functions" if self._spec.kind == "combined" else "custom_reward_function"
                worker.complaint = RewardError(what, where, todo)
            case _:
                return False
        return True

    def _take(self, worker: _Worker, number: int, outcomes: list[Outcome], start: float, end: float) -> bool:
        """The answer to the worker's first task; False if it is no such answer."""
        expected = worker.pending[0] if worker.pending else None
        if expected is None or expected.number != number or len(outcomes) != len(expected.keys):
            return False
        task = worker.pending.popleft()
        task.seconds = end - start
        worker.deadline = end + self._timeout  # by the worker's clock, which is ours: the answer may have lain here
        if worker.warm:  # the first task may have imported what it needs: it says nothing about the next
            seconds = end - start
            known = seconds if self._task_s is None else self._task_s
            self._task_s = 0.9 * known + 0.1 * min(seconds, 10 * known)  # one that was interrupted is no slow function
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
                self._bury(worker, f"it did not start within {IMPORT_S:g} s")
            elif worker.pending:
                slow = worker.pending[0]
                alive = self._hear(worker)  # the answer may have come in this very moment
                if worker.damaged:
                    self._bury(worker, _ENDED, blame=False)
                elif worker.pending and worker.pending[0] is slow:
                    self._bury(worker, f"took longer than {self._timeout:g} s" if alive else worker.fault or _ENDED)

    def _bury(self, worker: _Worker, reason: str, *, blame: bool = True) -> None:
        """Replace a worker: its first task failed for the reason stated, the others go back to the backlog's front."""
        worker.handle.kill()
        self._workers.remove(worker)
        if blame and worker.pending:
            task = worker.pending.popleft()
            self._finish(task, [failure(reason)] * len(task.keys))
        elif worker.ready and (worker.damaged or not worker.pending):
            self._lost_idle = True
        else:
            self._useless_deaths += 1
            # Workers that were ready may all have died at once, in the moment in which they were given work.
            if self._useless_deaths >= _USELESS_DEATHS + worker.ready * self._size:
                raise worker.complaint or RewardError(
                    f"{_USELESS_DEATHS} reward workers in a row were lost, the last because {reason}",
                    self._spec.label,
                    "run the reward's file alone with python; look for exits, memory limits and slow imports",
                )
        self._give_back(worker)

    def _tell_of_damage(self, lasting: str, repaired: str) -> None:
        """Say what a reward changes, once for each kind of change."""
        label = self._spec.label
        if lasting and "lasting" not in self._told:
            self._told.add("lasting")
            self._print(
                f"note: the reward {label} replaced {lasting} while it scored. Other scores of the same worker process "
                "would be wrong, so each worker is replaced after such a score, which takes time. Let the function "
                "put back what it changes, or run what changes it in a process of its own."
            )
        if repaired and "repaired" not in self._told:
            self._told.add("repaired")
            self._print(
                f"note: the reward {label} changed {repaired} while it scored; it is put back after each score."
            )

    def _print(self, line: str) -> None:
        try:
            self._on_print(line)
        except Exception as error:  # the caller's mistake, in our thread: say it and go on scoring
            print(f"on_print failed: {error!r}")
