"""What a process starts of Ray, and its end: a watcher beside it, a folder of its own, an environment to inherit.

The watcher holds the other end of a pipe. When the pipe closes, however the process ended, it kills what Ray has
started (known by a mark in its environment, or by a file in its folder) and removes the folder: Ray itself leaves
processes for a minute or more after its driver was killed, and its session folder for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "POSTTRAIN_RAY"
LONGEST_FOLDER = 40  # a socket's path may have 107 bytes, and Ray adds its own names
CLOSE_S = 30.0  # for the watcher; Ray's processes are gone within two seconds
_WATCHER = Path(__file__).with_name("watcher.py")
_TORCHRUNS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


class Watched:
    """A folder for Ray, and the watcher that ends what is started inside `environment` and removes the folder."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        base = base if len(base) + 20 <= LONGEST_FOLDER else "/tmp"
        self.folder = tempfile.mkdtemp(prefix="posttrain-", dir=base)
        self._mark = secrets.token_hex(8)
        self._watcher = self._watch(subprocess.PIPE)

    def _watch(self, until_it_closes: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WATCHER), f"{MARK}={self._mark}", self.folder],
            stdin=until_it_closes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C is for the run
        )

    @contextlib.contextmanager
    def environment(self, variables: Mapping[str, str]) -> Iterator[None]:
        """What the processes of this Ray inherit: the mark, `variables`, no statistics sent anywhere, nothing of
        torchrun's. Afterwards this process has its own environment again."""
        before = dict(os.environ)
        log = logging.getLogger("ray._private.authentication.authentication_token_setup")
        level = log.level
        log.setLevel(logging.ERROR)  # it tells that a secret is asked for
        os.environ.update({MARK: self._mark, "RAY_USAGE_STATS_ENABLED": "0", **variables})
        for variable in before:  # a rank that found torchrun's variables would join torchrun's group, not the run's
            if variable in _TORCHRUNS or variable.startswith("TORCHELASTIC_"):
                del os.environ[variable]
        try:
            yield
        finally:
            log.setLevel(level)
            os.environ.clear()
            os.environ.update(before)

    def close(self) -> None:
        """End what was started. A process that cannot be killed (it waits inside the kernel, for a disk or a driver) is
        left to the watcher, which keeps trying; the finished run does not wait for it."""
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._watcher.wait(CLOSE_S) != 0:  # the watcher itself was killed: start another
                self._watch(subprocess.DEVNULL).wait(CLOSE_S)
