"""RewardPool: computes scores in worker processes, each with a deadline, while the caller goes on generating.

Results are the same for any number of workers and any timing, unless a function exceeds its deadline. If a function
raises, hangs, exits or returns no finite number, its sample gets the failure score and an error text. It never stops or
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
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain import cores, pulse
from posttrain.machines.cluster import Machines, Places
from posttrain.rewards.crew import Crew, Task, WorkerProcess
from posttrain.rewards.types import Outcome, Payload, RewardError, RewardItem, RewardResult, RewardSpec
from posttrain.texts import well_formed

MOST = 8  # workers of a machine, unless `reward.num_workers` says otherwise


def pool_size(num_workers: int | None) -> int:
    """Return the number of worker processes for `reward.num_workers`; null means one per core, at most eight."""
    return num_workers or min(MOST, cores.usable())


class _RemoteWorkers:
    """Starts workers on another machine."""

    def __init__(self, spec: bytes, check: Callable[[], Any] | None) -> None:
        if check is not None:
            check()
        self.spec: RewardSpec = pickle.loads(spec)  # the driver's own, by Ray's call

    def start(self) -> WorkerProcess:
        return WorkerProcess(self.spec)


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
        first: WorkerProcess | None = None,
        check_machine: Callable[[], Any] | None = None,
    ) -> None:
        # `first` is a worker that is ready and already has this spec; the pool owns it from now on. `check_machine`
        # raises where the reward cannot be computed on the machine that calls it.
        self.check_machine, self.num_workers = check_machine, num_workers
        if num_workers is not None and num_workers < 1:
            raise RewardError(
                f"reward.num_workers is {num_workers}", "reward.num_workers", "set it to 1 or more, or to null"
            )
        if not timeout_s > 0:
            raise RewardError(
                f"reward.timeout_s is {timeout_s}", "reward.timeout_s", "set it to a number of seconds above 0"
            )
        self.spec = replace(spec, timeout_s=timeout_s)
        self._failure_score = failure_score
        size = pool_size(num_workers)
        self.lane = pulse.Lane("reward", "rewards")
        self._changed = threading.Condition()
        # Guarded by _changed:
        self._queue: deque[Task] = deque()
        self._groups: dict[Hashable, tuple[int, list[tuple[Hashable, Payload]]]] = {}
        self._open: set[Hashable] = set()
        self._done: dict[Hashable, RewardResult] = {}
        self._error: RewardError | None = None
        self._closing = self._woken = False
        self._next = 0
        # Touched by the thread only:
        self._crew = Crew(self.spec, size, timeout_s, on_print, first)
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, item: RewardItem) -> None:
        """Submit an item for scoring; a list-form function is called when the last item of its group has arrived."""
        self.submit_many([(key, item)])

    def submit_many(self, items: Sequence[tuple[Hashable, RewardItem]]) -> None:
        """Submit many items at little cost; none is accepted if one is invalid."""
        payloads = _payloads([item for _, item in items], whole=self.spec.form == "batch")
        keys = {key for key, _ in items}
        with self._changed:
            self._check_usable()
            if len(keys) < len(items) or self._open & keys or self._done.keys() & keys:
                raise ValueError(f"key {self._find_duplicate(items)!r} is already being scored")
            self._open |= keys
            for (key, item), payload in zip(items, payloads, strict=True):
                if not self.spec.takes_groups or item.group is None or item.group_size <= 1:
                    self._enqueue([(key, payload)])
                    continue
                size, members = self._groups.setdefault(item.group, (item.group_size, []))
                members.append((key, payload))
                if len(members) >= size:
                    self._enqueue(self._groups.pop(item.group)[1])
            self._wake()
            self._note_lane()

    def shrink_group(self, group: Hashable, size: int) -> None:
        """Expect one item fewer of a group of this size."""
        if not self.spec.takes_groups:
            return
        with self._changed:
            size, members = self._groups.pop(group, (size, []))
            if len(members) < size - 1:
                self._groups[group] = (size - 1, members)
            elif members:
                self._enqueue(members)
            self._wake()
            self._note_lane()

    def poll(self) -> list[tuple[Hashable, RewardResult]]:
        """Return what has been scored since the last call, without waiting."""
        with self._changed:
            self._check_usable()
            done, self._done = self._done, {}
        return list(done.items())

    def wait_some(self) -> list[tuple[Hashable, RewardResult]]:
        """Like `poll`, but wait for at least one score if any is being computed."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or not self._open or self._error or self._closing)
        return self.poll()

    def wait_all(self) -> dict[Hashable, RewardResult]:
        """Return everything submitted and not yet returned; incomplete groups are scored as they are."""
        with self._changed:
            for group in list(self._groups):
                self._enqueue(self._groups.pop(group)[1])
            self._wake()
            self._note_lane()
            with pulse.work("scores", len(self._open)) as work:
                while not self._changed.wait_for(lambda: not self._open or self._error or self._closing, timeout=0.5):
                    work.done = work.total - len(self._open)
            self._check_usable()
            done, self._done = self._done, {}
        return done

    def spread(self, machines: Machines, say: Callable[[str], object]) -> None:
        """Start further workers on these machines, as many on each as here."""
        make = partial(_RemoteWorkers, pickle.dumps(self.spec), self.check_machine)
        ready = machines.prepare("rewards", make, "rewards are not computed", say)
        if not ready:
            return
        shares = [(machine, self.num_workers or min(MOST, machine.cores)) for machine in ready]
        with self._changed:
            # Read by the pool's thread when it has been woken.
            self._crew.places = places = Places(self._crew.start_here, pool_size(self.num_workers), "rewards", shares)
            if not self._woken:
                self._woken = True
                os.write(self._wake_write, b".")
        say(f"Reward workers: {places.room} on {places.machines} machines.")

    def close(self) -> None:
        """End all workers; results that were not fetched are lost."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            os.write(self._wake_write, b".")
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

    def _find_duplicate(self, items: Sequence[tuple[Hashable, RewardItem]]) -> Hashable:
        seen = self._open | self._done.keys()
        for key, _ in items:
            if key in seen:
                return key
            seen.add(key)
        raise AssertionError("all keys are new")

    def _enqueue(self, members: list[tuple[Any, Payload]]) -> None:
        if len(members) > 1:
            # Keys that cannot be compared: the group stays in the order of submission.
            with contextlib.suppress(TypeError):
                members = sorted(members, key=lambda member: member[0])
        self._queue.append(Task(self._next, [key for key, _ in members], [payload for _, payload in members]))
        self._next += 1

    def _note_lane(self) -> None:
        # Members of an incomplete group wait for responses, not for workers.
        self.lane.note(len(self._open) > sum(len(members) for _, members in self._groups.values()))

    def _wake(self) -> None:
        if self._queue and not self._woken:
            self._woken = True
            os.write(self._wake_write, b".")

    # The rest runs in the pool's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._deliver(self._crew.work(self._wake_read))
                with self._changed:
                    if self._woken:
                        self._woken = False
                        os.read(self._wake_read, 1)
                    self._crew.backlog.extend(self._queue)
                    self._queue.clear()
        except RewardError as error:
            self._fail(error)
        except BaseException as error:  # a bug of ours must not make the caller wait forever
            self._fail(RewardError(f"the reward pool stopped: {type(error).__name__}: {error}"))
            raise
        finally:
            self._crew.end()

    def _fail(self, error: RewardError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _deliver(self, done: list[tuple[Task, list[Outcome]]]) -> None:
        if not done:
            return
        results: dict[Hashable, RewardResult] = {}
        for task, outcomes in done:
            for key, (score, parts, error) in zip(task.keys, outcomes, strict=True):
                results[key] = _result(self._failure_score if error else score, parts, error)
                results[key].seconds = task.seconds
        with self._changed:
            self._open.difference_update(results)
            self._note_lane()
            self._done |= results
            self._changed.notify_all()


def _result(score: float, parts: dict[str, float | str], error: str | None) -> RewardResult:
    # The text of an error may hold a lone surrogate, which could not be written to a file.
    cleaned = {well_formed(name): part for name, part in parts.items()}
    cleaned |= {name: well_formed(part) for name, part in cleaned.items() if isinstance(part, str)}
    return RewardResult(score, cleaned, well_formed(error) if error else error)


def _payloads(items: Sequence[RewardItem], *, whole: bool) -> list[Payload]:
    # With `whole`, also what functions of TRL's form need. What the responses to one prompt share is pickled once, and
    # unpickled for each: a function that changes it changes only its own copy.
    known: dict[tuple[int, ...], bytes] = {}
    payloads: list[Payload] = []
    for item in items:
        shared = (item.data_source, item.ground_truth, item.extra_info)
        shared += (item.prompt, item.progress) if whole else ()
        same = tuple(id(one) for one in shared)
        row = known.get(same)
        if row is None:
            row = known[same] = pickle.dumps(shared, protocol=5)
        payloads.append((row, item.solution_str, item.tokens, item.own_words, item.token_ids if whole else None))
    return payloads


# At most this many lines are shown per this many seconds.
SHOWN_LINES, SHOWN_S = 40, 10.0
CUT = f"... more than {SHOWN_LINES} lines of the reward in {SHOWN_S:.0f} s; `posttrain reward try` shows all"


class PrintLimiter:
    """Passes lines on to `say`; beyond the limit, one line says that others are omitted.

    A thousand responses per step may print a line each, which would flood a console and a log.
    """

    def __init__(self, say: Callable[[str], Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since, self._lines = clock(), 0

    def __call__(self, line: str) -> None:
        now = self._clock()
        if now - self._since >= SHOWN_S:
            self._since, self._lines = now, 0
        self._lines += 1
        if self._lines <= SHOWN_LINES:
            self._say(line)
        elif self._lines == SHOWN_LINES + 1:
            self._say(CUT)
