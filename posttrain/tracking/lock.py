"""A lock file: at most one living process writes a run. The kernel frees it when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from posttrain.errors import UserError


class RunDirectoryError(UserError):
    """A run directory cannot be used; the text says what to do."""


class RunTaken(RunDirectoryError):
    """Another process has it."""


# POSIX locks do not keep out a second opener in the same process, so that is done here. They are chosen over flock
# because a forked child (a reward worker that outlives a killed run) does not inherit them.
_held: set[Path] = set()


class RunLock:
    """Held from `acquire` to `release` or to the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; a RunDirectoryError names the process that has it."""
        key = self.path.resolve()
        if key in _held:
            raise self._taken(f"this process ({os.getpid()})")
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise self._taken(owner or "another process") from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._descriptor = descriptor
        _held.add(key)

    def release(self) -> None:
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self.path.resolve())

    def _taken(self, owner: str) -> RunTaken:
        return RunTaken(
            f"The run directory {self.path.parent} is in use by {owner}. Wait for it or end it, or choose another "
            "trainer.experiment_name."
        )
