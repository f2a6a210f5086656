"""Where the workers of a run are made: in this process, or in one process per rank that Ray starts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.controller.group import Future, WorkerGroup
from posttrain.controller.incidents import WorkerDied

_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class StagePeaks:
    """`begin` before a stage, `end` after it; `take` gives what was measured and begins anew."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}

    def begin(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):
                _RESET.write_text("5")  # the kernel's high-water mark starts from now

    def end(self, stage: str) -> None:
        peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_initialized() else resident_peak()
        if peak is not None:
            self._peaks[stage] = max(peak, self._peaks.get(stage, 0.0))

    def by_stage(self) -> dict[str, float]:
        """What was measured since the last time."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def take(self) -> dict[str, float]:
        """As metrics: `perf/memory_gb/STAGE`, and `perf/memory_gb` for the largest."""
        return as_metrics([self.by_stage()])


def as_metrics(workers: Sequence[Mapping[str, float]], name: str = "perf/memory_gb") -> dict[str, float]:
    """By stage the fullest of these workers, and the largest of all."""
    stages = dict.fromkeys(stage for peaks in workers for stage in peaks)
    found = {f"{name}/{stage}": round(max(peaks.get(stage, 0.0) for peaks in workers), 6) for stage in stages}
    return {name: max(found.values()), **found} if found else {}


def resident_peak() -> float | None:
    """The most that this process held resident since the mark was reset; None where the kernel does not tell."""
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e9
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def begin_trace() -> torch.profiler.profile:
    """From now on this thread's operations and the GPU's kernels are recorded."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    return profiler


def end_trace(profiler: torch.profiler.profile, path: Path | None) -> None:
    """Write the recorded trace, or drop it without a path; the file appears when it is complete."""
    profiler.stop()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)  # a rank may be on another machine
    partial = path.with_name(f".{path.name}")  # its suffix decides that it is compressed
    profiler.export_chrome_trace(str(partial))
    os.replace(partial, path)


ROLLOUT = "rollout"


@dataclass(frozen=True)
class RolePool:
    """Processes of its own for one role. `setting` is what asks for them, for messages.

    Each is a world of one rank, or all of them `together` are one. `team` neighbours are placed on one machine."""

    role: str
    workers: int
    setting: str
    together: bool = False
    team: int = 1

    @property
    def title(self) -> str:
        """`reward model`."""
        return self.role.replace("_", " ")


def role_of(name: str) -> str:
    """The role of a worker of a pool, by its name: `rollout 1`; that of one that trains (`rank 1`) is `rank`."""
    return name.rpartition(" ")[0]


class Workers(ABC):
    """Makes worker groups; roles of one run share the processes of their ranks. Use `with`, or `close`."""

    world_size: int
    in_ray: bool = False

    @abstractmethod
    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        """A worker of this class in every process of the role, made with these arguments."""

    def own_size(self, role: str) -> int:
        """Processes that a role has for itself; 0 where it is made on every rank, as others are."""
        return 0

    def replace_alone(self, role: str) -> bool:
        """From now on a lost worker of this role can be replaced while the others go on. False where not."""
        return False

    def number_of_lost(self, role: str, death: WorkerDied) -> int:
        """Which worker of the role was lost. Raises `death` if it was another one, or if its machine is lost, too."""
        raise death

    def replace(self, role: str, number: int) -> None:
        """Start a new process in the place of this worker of the role, without a model yet; and in the places of all
        that hold one model with it."""
        raise NotImplementedError(f"{type(self).__name__} has no processes for one role alone")

    def spans(self) -> list[list[Any]]:
        """[method, when it began, its seconds, who] of the ranks' work since the last time; none where the caller's own
        times say it all."""
        return []

    def check(self) -> None:
        """Raises WorkerDied where a worker is gone, or is stopped for too long."""
        return

    def peaks(self) -> StagePeaks:
        """Measures the workers' memory by stage; this process's, where they are in it."""
        return StagePeaks()

    def printed(self) -> Iterator[tuple[str, list[str], list[str] | None]]:
        """(worker, files on its machine, their lines) of what workers print; lines are None where this machine has the
        files, and nothing is given for this process."""
        return iter(())

    def gpu(self) -> tuple[str, int, bool] | None:
        """(name, bytes, whether it is a Hopper) of a worker's GPU; None where it is this process's own."""
        return None

    def traced(self, stem: Path) -> AbstractContextManager[None]:
        """Inside, every rank records what it does, and writes STEM.rank_R.json.gz in the end; nothing where the
        caller's own trace says it all."""
        return nullcontext()

    @abstractmethod
    def words(self) -> str:
        """Where they are, for the user."""

    def places(self, generating: int = 0) -> list[str]:
        """Sentences on which workers train and which have one role alone, such as rollout; `generating` says that the
        first so many of those that train also generate. None where all do everything."""
        return []

    @abstractmethod
    def close(self) -> None:
        """End what was started for them."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalWorkers(Workers):
    """One rank: this process. Nothing is started and nothing copied."""

    world_size = 1

    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        return LocalWorkerGroup(worker(*arguments, **named))

    def words(self) -> str:
        return "one process, no Ray needed"

    def close(self) -> None:
        pass


class Finished(Future[Any]):
    """A call of a worker in this process: it was made when it was asked for."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._value = self._error = None
        try:
            self._value = call(*arguments)
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class LocalWorkerGroup(WorkerGroup):
    """Looks to the trainer like any worker group; only methods marked with `register` can be called."""

    world_size = 1
    overlaps = False

    def __init__(self, worker: Any) -> None:
        self.worker, self.worker_class = worker, type(worker)
        self.config = getattr(worker, "config", None)  # a worker of the user's own may keep none

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return Finished(getattr(self.worker, name), *arguments)

    def _joined(self, parts: list[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
        return Finished(lambda: join([part.result() for part in parts]))

    def wait_any(self, futures: Sequence[Future[Any]]) -> None:
        """Local calls are done when they were made."""
