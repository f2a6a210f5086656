"""Where the workers of a run are made: in this process, or in one process per rank that Ray starts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from posttrain.controller.group import WorkerGroup
from posttrain.controller.local import LocalWorkerGroup
from posttrain.controller.peaks import StagePeaks

ROLLOUT = "rollout"
"""The role that processes of its own may have."""


class Workers(ABC):
    """Makes worker groups; roles of one run share the processes of their ranks. Use `with`, or `close`."""

    world_size: int
    rollout_size: int = 0
    """Further processes, for the role `rollout` alone; without them it is made on every rank, as the others are."""

    @abstractmethod
    def create(self, role: str, worker: type, *arguments: Any, **named: Any) -> WorkerGroup:
        """A worker of this class on every rank, made with these arguments."""

    def spans(self) -> list[list[Any]]:
        """[method, when it began, its seconds, who] of the ranks' work since the last time; none where the caller's own
        times say it all."""
        return []

    def peaks(self) -> StagePeaks:
        """Measures the workers' memory by stage; this process's, where they are in it."""
        return StagePeaks()

    def traced(self, stem: Path) -> AbstractContextManager[None]:
        """Inside, every rank records what it does, and writes STEM.rank_R.json.gz in the end; nothing where the
        caller's own trace says it all."""
        return nullcontext()

    @abstractmethod
    def words(self) -> str:
        """Where they are, for the user."""

    def places(self) -> list[str]:
        """Sentences on who trains and who generates where; none where the same workers do both."""
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
