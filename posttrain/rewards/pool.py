"""RewardPool: scores in worker processes, each with a deadline, while the caller goes on generating.

Results are the same for any number of workers and any timing, unless a function passes its deadline. A function that
raises, hangs, exits or returns no finite number gives its sample the failure score and an error text; it never stops or
hangs the run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

from posttrain.rewards.loading import IMPORT_S
from posttrain.rewards.process import WorkerProcess
from posttrain.rewards.types import RewardError, RewardItem, RewardResult, RewardSpec

_CHUNK = 32
"""Most tasks that are sent to a worker at once."""
_CHUNK_S = 0.05
"""Seconds of work that a chunk should hold: slow functions are spread one by one over the workers."""
_USELESS_DEATHS = 3
"""Workers that may die in a row without having answered or been at work on a sample."""


@dataclass
class _Task:
    number: int
    keys: list[Hashable]
    payloads: list[bytes]


@dataclass
class _Worker:
    handle: WorkerProcess
    deadline: float
    ready: bool = False
    pending: deque[_Task] = field(default_factory=deque)
    complaint: RewardError | None = None


class RewardPool:
    """Scores items by key: `submit` as they come, `poll` for what is ready, `wait_all` for the rest. Use `with`."""

    def __init__(
        self,
        spec: RewardSpec,
        *,
        num_workers: int | None = None,
        timeout_s: float = 10.0,
        failure_score: float = 0.0,
        on_print: Callable[[str], Any] = print,
    ) -> None:
        if num_workers is not None and num_workers < 1:
            raise RewardError(
                f"reward.num_workers is {num_workers}", "reward.num_workers", "set it to 1 or more, or to null"
            )
        if not timeout_s > 0:
            raise RewardError(
                f"reward.timeout_s is {timeout_s}", "reward.timeout_s", "set it to a number of seconds above 0"
            )
        self.spec = replace(spec, timeout_s=timeout_s)
        self._timeout, self._failure_score, self._on_print = timeout_s, failure_score, on_print
        self._size = num_workers or min(
            8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._queue: deque[_Task] = deque()
        self._groups: dict[Hashable, tuple[int, list[tuple[Hashable, bytes]]]] = {}
        self._open: set[Hashable] = set()
        self._done: dict[Hashable, RewardResult] = {}
        self._error: RewardError | None = None
        self._closing = self._woken = False
        self._next = 0
        # Touched by the thread only:
        self._workers: list[_Worker] = []
        self._useless_deaths = 0
        self._task_s: float | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, item: RewardItem) -> None:
        """Take an item to be scored; a list-form function is called when the last item of its group has come."""
        fields = (item.data_source, item.solution_str, item.ground_truth, item.extra_info, item.tokens)
        payload = pickle.dumps(fields, protocol=5)
        with self._changed:
            self._check_usable()
            if key in self._open or key in self._done:
                raise ValueError(f"key {key!r} is already being scored")
            self._open.add(key)
            if self.spec.form != "list" or item.group is None or item.group_size <= 1:
                self._enqueue([(key, payload)])
                return
            _, members = self._groups.setdefault(item.group, (item.group_size, []))
            members.append((key, payload))
            if len(members) >= self._groups[item.group][0]:
                self._enqueue(self._groups.pop(item.group)[1])

    def poll(self) -> list[tuple[Hashable, RewardResult]]:
        """What has been scored since the last call, without waiting."""
        with self._changed:
            self._check_usable()
            done, self._done = self._done, {}
        return list(done.items())

    def wait_all(self) -> dict[Hashable, RewardResult]:
        """Everything submitted and not yet returned; groups that are still incomplete are scored as they are."""
        with self._changed:
            for group in list(self._groups):
                self._enqueue(self._groups.pop(group)[1])
            self._changed.wait_for(lambda: not self._open or self._error or self._closing)
            self._check_usable()
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """End all workers; results that were not fetched are gone."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._wake()
            self._changed.notify_all()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closing:
            raise RuntimeError("this RewardPool is closed")

    def _enqueue(self, members: list[tuple[Hashable, bytes]]) -> None:
        with contextlib.suppress(TypeError):  # keys without an order: a group stays in the order of submission
            members = sorted(members, key=lambda member: member[0])  # type: ignore[arg-type,return-value]
        self._queue.append(_Task(self._next, [key for key, _ in members], [payload for _, payload in members]))
        self._next += 1
        self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.write(self._wake_write, b".")

    # The rest runs in the pool's thread, which alone starts, hears and ends workers.

    def _run(self) -> None:
        try:
            while not self._closing:
                while len(self._workers) < self._size:
                    self._workers.append(_Worker(WorkerProcess(self.spec), time.monotonic() + IMPORT_S))
                self._hand_out()
                self._listen()
                self._enforce_deadlines()
        except RewardError as error:
            self._fail(error)
        except BaseException as error:  # a mistake of ours must not leave the caller waiting for ever
            self._fail(RewardError(f"the reward pool stopped: {type(error).__name__}: {error}"))
            raise
        finally:
            for worker in self._workers:
                worker.handle.kill()

    def _fail(self, error: RewardError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _hand_out(self) -> None:
        """Give idle workers a chunk each. Only idle ones: they are reading, so that sending cannot block."""
        for worker in list(self._workers):
            if not worker.ready or worker.pending:
                continue
            with self._changed:
                size = min(self._chunk_size(), -(-len(self._queue) // self._size))
                worker.pending.extend(self._queue.popleft() for _ in range(size))
            if not worker.pending:
                return
            worker.deadline = time.monotonic() + self._timeout
            try:
                worker.handle.conn.send([(task.number, task.payloads) for task in worker.pending])
            except OSError:
                self._bury(worker, "the worker process hung up", blame=False)

    def _chunk_size(self) -> int:
        if self._task_s is None:
            return 1
        return max(1, min(_CHUNK, int(_CHUNK_S / max(self._task_s, 1e-6))))

    def _listen(self) -> None:
        connections: dict[Any, _Worker] = {worker.handle.conn: worker for worker in self._workers}
        busy = [worker.deadline for worker in self._workers if worker.pending or not worker.ready]
        seconds = max(0.0, min(busy) - time.monotonic()) if busy else None
        for source in wait([*connections, self._wake_read], seconds):
            if source == self._wake_read:
                with self._changed:
                    self._woken = False
                    os.read(self._wake_read, 1)
            elif not self._hear(connections[source]):
                worker = connections[source]
                self._bury(worker, f"the worker process ended ({worker.handle.exit_text()})")

    def _hear(self, worker: _Worker) -> bool:
        """Take in all that a worker has said; False when it is gone."""
        try:
            while worker.handle.conn.poll():
                kind, *rest = worker.handle.conn.recv()
                if kind == "done":
                    self._take(worker, *rest)
                elif kind == "print" and worker.ready:  # what the import prints was shown when the reward was resolved
                    self._print(rest[0])
                elif kind == "wait":
                    worker.deadline = time.monotonic() + rest[0] + self._timeout
                elif kind == "ready":
                    worker.ready = True
                elif kind == "failed":
                    where = "reward.functions" if self.spec.kind == "combined" else "custom_reward_function"
                    worker.complaint = RewardError(rest[0], where, rest[1])
                    return False
        except (EOFError, OSError):
            return False
        return True

    def _take(
        self, worker: _Worker, number: int, outcomes: Sequence[tuple[float, dict, str | None]], seconds: float
    ) -> None:
        task = worker.pending.popleft()
        assert task.number == number, "a worker answers in the order of its tasks"
        worker.deadline = time.monotonic() + self._timeout
        self._task_s = seconds if self._task_s is None else 0.9 * self._task_s + 0.1 * seconds
        results = [
            RewardResult(self._failure_score if error else score, parts, error) for score, parts, error in outcomes
        ]
        self._deliver(task, results)

    def _deliver(self, task: _Task, results: list[RewardResult]) -> None:
        self._useless_deaths = 0
        with self._changed:
            self._open.difference_update(task.keys)
            self._done.update(zip(task.keys, results, strict=True))
            if not self._open:
                self._changed.notify_all()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._workers if w.deadline <= now]:
            if not worker.ready:
                self._bury(worker, f"it did not start within {IMPORT_S:g} s")
            elif worker.pending:
                slow = worker.pending[0]
                alive = self._hear(worker)  # the answer may have come in this very moment
                if not worker.pending or worker.pending[0] is not slow:
                    continue
                self._bury(worker, f"took longer than {self._timeout:g} s" if alive else "the worker process ended")

    def _bury(self, worker: _Worker, reason: str, *, blame: bool = True) -> None:
        """Replace a worker: its first task failed for the reason stated, the others go back to the queue's front."""
        worker.handle.kill()
        self._workers.remove(worker)
        if blame and worker.pending:
            task = worker.pending.popleft()
            self._deliver(task, [RewardResult(self._failure_score, {}, reason) for _ in task.keys])
        else:
            self._useless_deaths += 1
            if self._useless_deaths >= _USELESS_DEATHS:
                raise worker.complaint or RewardError(
                    f"{_USELESS_DEATHS} reward workers in a row were lost, the last because {reason}",
                    self.spec.label,
                    "run the reward's file alone with python; look for exits, memory limits and slow imports",
                )
        with self._changed:
            self._queue.extendleft(reversed(worker.pending))

    def _print(self, line: str) -> None:
        try:
            self._on_print(line)
        except Exception as error:  # the caller's mistake, in our thread: say it and go on scoring
            print(f"on_print failed: {error!r}")
