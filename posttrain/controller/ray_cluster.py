"""Ray for one run: started by itself on this machine, or found running; what was started here is gone with the run.

A watcher process holds the other end of a pipe. When the pipe closes, however the run ended, it kills what Ray has
started (known by a mark in its environment, or by a file in its folder) and removes the folder: Ray itself leaves
processes for a minute or more after its driver was killed, and its session folder for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import ray

from posttrain.errors import UserError

ADDRESSES = ("RAY_ADDRESS", "RAY_HEAD_ADDRESS")
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
_HOST_AND_PORT = re.compile(r"(?:ray://)?([\w.-]+):(\d+)$")
ANSWER_S = 5.0
LONGEST_FOLDER = 40  # a socket's path may have 107 bytes, and Ray adds its own names

_WATCHER = """
import os, shutil, signal, sys, time
mark, folder = sys.argv[1].encode(), sys.argv[2]
sys.stdin.buffer.read()
def ours(process):
    with open(f"{process}/environ", "rb") as file:
        if mark in file.read().split(b"\\0"):
            return True
    # A process that gave itself a title has written over its environment; its log lies in the folder. (So does one of
    # the run's own process, which must not be taken for one of Ray's.)
    with open(f"{process}/cmdline", "rb") as file:
        if not file.read().startswith(b"ray::"):
            return False
    return any(os.readlink(f"{process}/fd/{fd}").startswith(folder + "/") for fd in os.listdir(f"{process}/fd"))
def marked():
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if ours(f"/proc/{name}"):
                    yield int(name)
            except OSError:
                pass
quiet = 0
while quiet < 3:
    found = list(marked())
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    quiet = 0 if found else quiet + 1
    time.sleep(0.05)
shutil.rmtree(folder, ignore_errors=True)
"""


class NoRayThere(UserError):
    """The Ray whose address was given does not answer."""


class RayCluster:
    """`start` connects this process; `stop` leaves, and ends what `start` has started."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.address = ranks, given_address()
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
        settings: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.address:
            self._join(self.address, settings)
            return
        mark, self.folder = f"{MARK}={secrets.token_hex(8)}", _folder()
        self._watcher = _watch(mark, self.folder)
        self._connected = True
        with _environment(mark):
            ray.init(
                address="local",
                num_cpus=self.ranks,
                include_dashboard=False,
                _temp_dir=self.folder,
                _node_ip_address="127.0.0.1",
                **settings,
            )

    def _join(self, address: str, settings: dict[str, Any]) -> None:
        """Connect to a Ray that runs. Where nobody answers it would try for two minutes, and then end the process."""
        if (silence := _silence(address)) is not None:
            raise _no_ray(address, silence)
        try:
            ray.init(address=address, **settings)
        except ConnectionError as error:
            raise _no_ray(address, error) from error
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


def given_address() -> str | None:
    """Where the environment says that a Ray runs; with `RAY_HEAD_ADDRESS=auto`, that which `ray start` left here, if
    it answers."""
    plain, head = (os.environ.get(name) for name in ADDRESSES)
    if plain or head != "auto":
        return plain or head or None
    from ray._private.services import find_bootstrap_address

    found = find_bootstrap_address(None)
    return found if found and _silence(found) is None else None


def _no_ray(address: str, error: Exception) -> NoRayThere:
    name = next(name for name in ADDRESSES if os.environ.get(name))
    return NoRayThere(
        f"{name}={address}: no Ray answers there ({error}). Start it (ray start --head), give the address of one that "
        f"runs, or unset {name}: then a Ray is started for this run."
    )


def _silence(address: str) -> Exception | None:
    """Why nobody answers at host:port; None if somebody does, or where it has another form."""
    found = _HOST_AND_PORT.match(address)
    try:
        if found is not None:
            socket.create_connection((found[1], int(found[2])), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def _folder() -> str:
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="posttrain-", dir=base if len(base) + 20 <= LONGEST_FOLDER else "/tmp")


def _watch(mark: str, folder: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER, mark, folder],
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
