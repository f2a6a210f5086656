"""Ray for one run: started by itself on this machine, or found running; what was started here is gone with the run.

A watcher process holds the other end of a pipe. When the pipe closes, however the run ended, it kills what Ray has
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
from typing import Any

import ray

from posttrain.controller.ray_address import given_address, no_ray, silence_of
from posttrain.controller.ray_settings import as_arguments, refused_by_ray

MARK = "POSTTRAIN_RAY"
_TOKEN = secrets.token_hex(32)  # Ray reads it once per process
_TORCHRUNS = (
    *(
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
    ),
    *("GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
_WATCHER = Path(__file__).with_name("watcher.py")
LONGEST_FOLDER = 40  # a socket's path may have 107 bytes, and Ray adds its own names


class RayCluster:
    """`start` connects this process; `stop` leaves, and ends what `start` has started."""

    def __init__(self, ranks: int, settings: Mapping[str, Any] | None = None) -> None:
        self.ranks, self.address = ranks, given_address()
        self.settings = as_arguments(settings or {})
        """For `ray.init`, where they come before our own."""
        self._watcher: subprocess.Popen[bytes] | None = None
        self._connected = False
        self.was_there = False
        """Whether this process had a Ray before: it is used, and left as it is."""
        self.folder = ""
        """Of the Ray that was started here."""

    def start(self) -> None:
        if ray.is_initialized():  # inside an actor, or in a program that has connected itself
            self.was_there = True
            return
        quiet = {"log_to_driver": False, "configure_logging": False}
        if self.address:
            self._join(self.address, {**quiet, **self.settings})
            return
        mark, self.folder = f"{MARK}={secrets.token_hex(8)}", _folder()
        self._watcher = _watch(mark, self.folder)
        self._connected = True
        ours = {**quiet, "num_cpus": self.ranks, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        with _environment(mark), refused_by_ray(self.settings):
            ray.init(address="local", _temp_dir=self.folder, **{**ours, **self.settings})

    def _join(self, address: str, settings: dict[str, Any]) -> None:
        """Connect to a Ray that runs. Where nobody answers it would try for two minutes, and then end the process."""
        if (silence := silence_of(address)) is not None:
            raise no_ray(address, silence)
        try:
            with refused_by_ray(self.settings):
                ray.init(address=address, **settings)
        except ConnectionError as error:
            raise no_ray(address, error) from error
        self._connected = True

    def words(self) -> str:
        if self.was_there:
            return "which this process is connected to"
        return f"at {self.address}" if self.address else "started for this run"

    def stop(self) -> None:
        if self._connected:
            self._connected = False
            ray.shutdown()
        if self._watcher is not None:
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None


def _folder() -> str:
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="posttrain-", dir=base if len(base) + 20 <= LONGEST_FOLDER else "/tmp")


def _watch(mark: str, folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(_WATCHER), mark, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the run
    )


@contextlib.contextmanager
def _environment(mark: str) -> Iterator[None]:
    """What the processes of this Ray inherit: the mark, a secret of their own (so that none is written into the home
    folder), no statistics sent anywhere, nothing of torchrun's. Afterwards this process has its own environment
    again."""
    name, _, value = mark.partition("=")
    own = {name: value, "RAY_AUTH_TOKEN": _TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
    before = dict(os.environ)
    log = logging.getLogger("ray._private.authentication.authentication_token_setup")
    level = log.level
    log.setLevel(logging.ERROR)  # it tells that a secret is asked for
    os.environ.update(own)
    for variable in before:
        if variable in _TORCHRUNS or variable.startswith("TORCHELASTIC_"):
            del os.environ[variable]
    try:
        yield
    finally:
        log.setLevel(level)
        os.environ.clear()
        os.environ.update(before)
