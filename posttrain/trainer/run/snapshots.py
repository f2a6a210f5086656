"""Snapshots: the state of a run in the memory of its machine, from which lost workers are started again.

A snapshot is a checkpoint in `/dev/shm`, made between those on the disk, so that little more than the step in flight is
repeated. It is made as checkpoints are, in the background, and so rarely that training waits for it 1% of the time. It
ends with the command, however that ends. Runs on several machines have none: ranks restore from files of one machine.
Asynchronous runs have none, either.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import cores
from posttrain.checkpoint.manager import CheckpointManager, WriteRole, capture_rng
from posttrain.config.trainer import one_process
from posttrain.controller.incidents import WorkerDied
from posttrain.errors import first_line
from posttrain.tracking.progress import say
from posttrain.trainer.run.memory import named_stage

if TYPE_CHECKING:
    from posttrain.controller.group import RoleGroup

MEMORY = Path("/dev/shm")
SHARE = 0.01  # of the time, at most, that training waits for snapshots
BYTES = 16  # of a parameter with its optimizer state, at most
COPIES = 3  # of the state at once: the one that is being written, its source in the ranks, and the last snapshot
FREE = 0.25  # of the free memory, at most, is taken


@contextmanager
def snapshot_folder(config: Any) -> Iterator[Path | None]:
    """A folder in memory that is gone with this process; None where a run has no use for it, or cannot have one."""
    if one_process(config) or config.trainer.max_restarts == 0 or config.trainer.nnodes > 1:
        yield None
        return
    from posttrain.controller.ray_address import given_address
    from posttrain.controller.ray_node import Watched

    # Ranks of a Ray that runs already may be on any machine.
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    if given_address() or connected or not os.access(MEMORY, os.W_OK):
        yield None
        return
    watched = Watched(str(MEMORY))
    try:
        yield Path(watched.folder)
    finally:
        watched.close()


class Snapshots:
    """Of one attempt of a run; those in `folder` stay for the next. Without a folder none is ever due."""

    def __init__(self, folder: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._manager = None if folder is None else CheckpointManager(folder, keep=1, on_note=lambda note: None)
        self._clock, self._ended, self._waited = clock, clock(), 0.0

    def is_due(self) -> bool:
        """Whether enough time has passed since the last one, and that is written."""
        rested = SHARE * (self._clock() - self._ended) >= self._waited
        return self._manager is not None and rested and not self.is_writing

    def take(
        self,
        step: int,
        *,
        roles: Mapping[str, RoleGroup],
        writers: Mapping[str, WriteRole],
        state: dict[str, Any],
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """A snapshot of this step, written while training goes on. After one that fails there are no more."""
        manager = self._manager
        if manager is None or not self._fits(manager.folder, roles):
            return
        began = self._clock()
        try:
            with named_stage("snapshot"):
                manager.save(step, tensors=writers, state=state, rng=capture_rng(), extra=extra, background=True)
        except WorkerDied:
            raise
        except Exception as error:
            self._give_up(f"one could not be written: {first_line(error)}")
        self._ended = self._clock()
        self._waited = self._ended - began

    @property
    def is_writing(self) -> bool:
        return self._manager is not None and self._manager.is_writing

    def newest(self) -> Path | None:
        return None if self._manager is None else self._manager.newest()

    def end(self, *, abandon: bool = False) -> None:
        """Until none is being written, or with what is written of it removed."""
        if self._manager is None:
            return
        if abandon:
            self._manager.abandon()
        try:
            self._manager.wait()
        except Exception as error:
            self._give_up(f"one could not be written: {first_line(error)}")

    def _fits(self, folder: Path, roles: Mapping[str, RoleGroup]) -> bool:
        size = BYTES * sum(role.group.once("engine_facts").parameters for role in roles.values())
        room = min(FREE * cores.free_memory(), shutil.disk_usage(folder).free)
        if COPIES * size > room:
            self._give_up(f"{COPIES} times {size / 1e9:.1f} GB are more than the {room / 1e9:.1f} GB that it may take")
        return self._manager is not None

    def _give_up(self, reason: str) -> None:
        say(f"note: no snapshots are kept in memory ({reason}); lost workers restart from the newest checkpoint.")
        self._manager = None
