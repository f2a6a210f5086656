"""Ray's processes on this machine: a node that other machines can reach (a head, or one that joins), and their end.

Each process that starts Ray has a watcher beside it, which holds the other end of a pipe. When the pipe closes, however
the process ended, the watcher kills what Ray has started (known by a mark in its environment, or by a file in its
folder) and removes the folder: Ray itself leaves processes for a minute or more after its driver was killed, and its
session folder for ever.

`serve` is what every machine of a run but the first does: it joins the first one's Ray, and leaves when the run ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain import cores
from posttrain.controller import ray_address
from posttrain.controller.ray_address import OWN, connection_error, no_ray, shown_by_a_node, users_secret
from posttrain.engine.ranks import address_facing
from posttrain.errors import UserError

MARK = "POSTTRAIN_RAY"
NICENESS = "RAY_worker_niceness"  # 15 by default: beside any other busy process workers would hardly run
LONGEST_FOLDER = 40  # a socket's path may have 107 bytes, and Ray adds its own names
CLOSE_S = 30.0  # for the watcher; Ray's processes are gone within two seconds
_WATCHER = Path(__file__).with_name("watcher.py")
_TORCHRUNS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


class Watched:
    """A folder (in `base`), and the watcher that ends what is started inside `environment` and removes the folder."""

    def __init__(self, base: str | None = None) -> None:
        base = base or tempfile.gettempdir()
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
        os.environ.setdefault(NICENESS, "0")
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


START_S = 60.0


class NoNode(UserError):
    """A node of Ray did not come up."""


class RayNode:
    """`ray start` with these options, for as long as this process lives; `close` ends it at once."""

    def __init__(self, options: Sequence[str], variables: Mapping[str, str]) -> None:
        self._watched = Watched()
        self.folder, self.environment = self._watched.folder, self._watched.environment
        self._log = Path(self.folder, "ray_start.log")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        if not any(option.startswith("--num-cpus") for option in options):
            command.append(f"--num-cpus={cores.usable()}")
        with self._watched.environment(variables), self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--temp-dir={self.folder}", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._come_up()
        except BaseException:
            self.close()
            raise

    def _come_up(self) -> None:
        until = time.monotonic() + START_S
        while not Path(self.folder, "ray_current_cluster").exists():  # written when all of the node runs
            if self.ended() or time.monotonic() > until:
                why = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
                raise NoNode(f"`ray start` gave no node on this machine. Its last words:\n{why}")
            time.sleep(0.1)

    def ended(self) -> bool:
        """Whether the node has gone, as it does some time after its head."""
        return self._process.poll() is not None

    def ranks(self) -> int:
        """Processes of a run's ranks on this node."""
        return sum(1 for _ in self._ranks())

    def _ranks(self) -> Iterator[str]:
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                if Path("/proc", name, "cmdline").read_bytes().startswith(b"ray::RankHost"):
                    files = [os.readlink(fd) for fd in Path("/proc", name, "fd").iterdir()]
                    if any(file.startswith(self.folder + "/") for file in files):
                        yield name
            except OSError:  # the process is gone, or belongs to another user
                continue

    def close(self) -> None:
        """The watcher ends the node; `ray start` itself may have lost its mark."""
        self._watched.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)


PORT = 6379  # of a head whose address the user types on the other machines
_OF_A_NODE = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
_OF_A_HEAD = ("include_dashboard", "dashboard_host", "dashboard_port")
# Arguments of `ray.init` that concern a Ray that is started; Ray rejects most of them for one that runs.
OF_A_START = (*_OF_A_NODE, *_OF_A_HEAD, "_node_ip_address", "_memory", "_system_config")


class PortTaken(UserError):
    """Another program has the port of the head."""


class RayHead(RayNode):
    """`settings` are arguments of `ray.init`: those of the node are used here, `rest` is for processes that connect."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        met = ray_address.is_meeting()
        host, port = (_own_address(ray_address.master()), _free_port()) if met else (_own_address(), PORT)
        self.address, self.token = f"{host}:{port}", OWN if met and not users_secret() else ""
        self.secret = {"RAY_AUTH_TOKEN": self.token} if self.token else {}
        if connection_error(self.address) is None:
            raise PortTaken(
                f"{self.address} is taken by another program, and Ray's head cannot be started there. End it; or start "
                "Ray yourself (ray start --head --port=PORT) and name it on all machines: RAY_HEAD_ADDRESS=HOST:PORT"
            )
        given = {"include_dashboard": False, **settings}
        options = [_option(name, given[name]) for name in (*_OF_A_NODE, *_OF_A_HEAD) if name in given]
        self.rest = {name: value for name, value in settings.items() if name not in (*_OF_A_NODE, *_OF_A_HEAD)}
        super().__init__(["--head", f"--node-ip-address={host}", f"--port={port}", *options], self.secret)

    def tell_users(self, tell: Callable[[str], None], machines: int) -> None:
        """Print the command for the other machines, and whether others may join too."""
        others = "1" if machines == 2 else f"1 to {machines - 1}"
        tell(
            f"Started Ray's head. Give the same command on the other machines, with RAY_HEAD_ADDRESS={self.address} "
            f"and trainer.node_rank={others}."
        )
        if not users_secret():
            tell(
                f"note: whoever reaches {self.address} can run programs here. To have a secret, put one file "
                "~/.ray/auth_token (`ray get-auth-token --generate` makes it) on all machines."
            )


def _option(name: str, value: Any) -> str:
    """An argument of `ray.init` as one of `ray start`."""
    text = str(value).lower() if isinstance(value, bool) else value
    if isinstance(value, Mapping):
        text = ",".join(f"{k}={v}" for k, v in value.items()) if name == "labels" else json.dumps(value)
    return f"--{name.replace('_', '-')}={text}"


def _own_address(host: str = "") -> str:
    """The address under which this machine is seen from `host`; from the network, without one."""
    from ray.util import get_node_ip_address

    return (address_facing(host) if host else None) or get_node_ip_address()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


HEAD_S = 300.0  # for the head, which the first machine starts when it has read its data
EVERY_S = 0.5
SILENCES = 3  # times in a row that nothing is found before it is believed


class RunNeverCame(UserError):
    """The Ray that this machine has joined ended before the run used it."""


def serve(address: str, tell: Callable[[str], None], token: str = "") -> None:
    """Have this machine serve the run of the Ray at `address` until it has ended."""
    _wait_for_head(address, tell)
    node = RayNode([f"--address={address}"], shown_by_a_node(token, address))
    try:
        tell(f"This machine has joined the Ray at {address}. It serves machine 0's run until that ends.")
        _serve_until_end(node, address)
    finally:
        node.close()
    tell("The run has left this machine.")


def _wait_for_head(address: str, tell: Callable[[str], None]) -> None:
    until, reported = time.monotonic() + HEAD_S, False
    while (error_there := connection_error(address)) is not None:
        if time.monotonic() > until:
            raise no_ray(address, error_there)
        if not reported:
            tell(f"Waiting {HEAD_S:.0f} s for a Ray to answer at {address} ({error_there}).")
        reported = True
        time.sleep(EVERY_S)


def _serve_until_end(node: RayNode, address: str) -> None:
    """Until ranks were at work here and are gone, or the head is."""
    worked, idle, silent = False, 0, 0
    while idle < SILENCES and silent < SILENCES and not node.ended():
        time.sleep(EVERY_S)
        at_work = node.ranks() > 0
        worked = worked or at_work
        idle = idle + 1 if worked and not at_work else 0
        silent = silent + 1 if connection_error(address) is not None else 0
    if not worked:
        raise RunNeverCame(
            f"The Ray at {address} is gone, and no worker was started on this machine: see what the command of machine "
            "0 (trainer.node_rank=0) says."
        )
