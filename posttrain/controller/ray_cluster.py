"""Ray for one run: started by itself, or found running; what was started here is gone with the run.

All machines of a run must have the same programs.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from posttrain.controller import ray_address
from posttrain.controller.ray_address import (
    OWN,
    asks_for_a_secret,
    connection_error,
    given_address,
    no_ray,
    users_secret,
    users_secret_as_asked,
    wrong_secret,
)
from posttrain.controller.ray_node import OF_A_START, RayHead, Watched
from posttrain.errors import UserError

ITSELF = "127.0.0.1"


@dataclass(frozen=True)
class Machine:
    """One of the cluster's. `address` is where its processes are found by the others of the run."""

    id: str
    address: str
    cores: int


def has_gpus() -> bool:
    """Whether a machine of the Ray that the environment names has GPUs; False without such a Ray."""
    address = given_address()
    if ray.is_initialized():
        return any(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if not address:
        return False
    cluster = RayCluster(1)
    cluster.start()
    try:
        return has_gpus()
    finally:
        cluster.stop()


PLACE = "in"  # the folder of posttrain: reported, and free to differ


class DifferentPrograms(UserError):
    """A machine of the run has another Python, torch or posttrain."""


def programs() -> dict[str, str]:
    """What this process runs, by name."""
    import torch

    root = Path(__file__).parents[1]
    files = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        files.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    own = f"files {files.hexdigest()[:8]}"
    return {"Python": platform.python_version(), "torch": str(torch.__version__), "posttrain": own, PLACE: str(root)}


def check_same_programs(of_ranks: Sequence[dict[str, str]], addresses: Sequence[str]) -> None:
    """Refuse ranks that do not run what the command runs."""
    here = programs()
    for found, address in zip(of_ranks, addresses, strict=True):
        differ = [name for name in here if name != PLACE and found[name] != here[name]]
        if differ:
            there, own = (", ".join(f"{name} {of[name]}" for name in differ) for of in (found, here))
            raise DifferentPrograms(
                f"The machine {address} does not run the same programs as the command: {there} in {found[PLACE]}, and "
                f"{own} in {here[PLACE]} here. All machines of a run need the same environment and code: what "
                "`ray start`, or the command with trainer.node_rank, finds there."
            )


class RefusedByRay(UserError):
    """Ray does not take an argument."""


def as_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `ray.init` gets: without what is null, and environment variables as text."""
    arguments = _without_null(given)
    variables = arguments.get("runtime_env", {}).get("env_vars")
    if variables:
        arguments["runtime_env"]["env_vars"] = {name: _text(value) for name, value in variables.items()}
    return arguments


@contextmanager
def refused_by_ray(settings: Mapping[str, Any]) -> Iterator[None]:
    """Around a start of Ray: an error about the user's arguments names them."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:  # Ray asserts what a number is
        if not settings:
            raise
        raise RefusedByRay(
            f"Ray did not start with trainer.ray_init ({', '.join(settings)}): {error} Correct or remove what it "
            "names; `python -c 'import ray; help(ray.init)'` lists its arguments."
        ) from error


def _without_null(value: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _without_null(item) if isinstance(item, Mapping) else item for name, item in value.items()}
    return {name: item for name, item in inner.items() if item is not None and item != {}}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# Ray's own switch, whatever the system: with 0 it stays on the loopback interface.
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_QUIET = {"log_to_driver": False, "configure_logging": False}


class RayCluster:
    """`start` connects this process; `stop` leaves, and ends what `start` has started. With several machines, and no
    address of a Ray that runs, it starts the head that the others join."""

    def __init__(
        self,
        ranks: int,
        settings: Mapping[str, Any] | None = None,
        machines: int = 1,
        tell: Callable[[str], None] = print,
        shared: Path | None = None,
    ) -> None:
        self.ranks, self.machines, self.tell, self.address = ranks, machines, tell, given_address()
        self.shared = shared  # a folder on a disk that all machines share: those of torchrun get the secret there
        self.settings = as_arguments(settings or {})  # for `ray.init`, where they come before our own
        self._started: Watched | RayHead | None = None
        self._connected = False
        self.was_there = False  # whether this process had a Ray before: it is used, and left as it is
        self.folder = ""  # of the Ray that was started here

    def start(self) -> None:
        if ray.is_initialized():  # inside an actor, or in a program that has connected itself
            self.was_there = True
        elif self.address:
            self._join(self.address)
        elif self.machines > 1:
            self._start_head()
        else:
            self._start_here()

    def _start_here(self) -> None:
        # A Ray of this machine alone. All its ports are on the loopback interface, so that other machines do not reach
        # it; other users of this machine do, and need the secret, which they cannot read.
        self._started = watched = Watched()
        self._connected, self.folder = True, watched.folder
        ours = {**_QUIET, "num_cpus": self.ranks, "include_dashboard": False, "_node_ip_address": ITSELF}
        given = {**ours, **self.settings}
        variables = {"RAY_AUTH_TOKEN": OWN, _CLUSTERS: "0"}
        with watched.environment(variables), refused_by_ray(self.settings), _loopback_stays(given["_node_ip_address"]):
            ray.init(address="local", _temp_dir=self.folder, **given)
        found = ray.util.get_node_ip_address()
        if given["_node_ip_address"] == ITSELF != found:
            self.tell(
                f"note: this version of Ray listens on {found}, not on the loopback interface alone. Its ports ask for "
                "a secret made for this run; close them to machines that you do not trust."
            )

    def _start_head(self) -> None:
        """A Ray that other machines can join: its address comes from torchrun's store, or from the user."""
        self._started = head = RayHead(self.settings)
        self.folder = head.folder
        with head.environment(head.secret), refused_by_ray(head.rest):
            ray.init(address="auto", _temp_dir=self.folder, **{**_QUIET, **head.rest})
        self._connected, self.address = True, head.address
        if ray_address.is_meeting():
            ray_address.tell_address(head.address, head.token, self.shared)
        else:
            head.tell_users(self.tell, self.machines)

    def _join(self, address: str) -> None:
        settings = {name: value for name, value in self.settings.items() if name not in OF_A_START}
        if left_out := [f"trainer.ray_init.{name}" for name in self.settings if name in OF_A_START]:
            self.tell(f"note: {', '.join(left_out)} not used: the Ray at {address} was started with its own.")
        # The address is tried first: where nothing answers, `ray.init` tries for two minutes and then ends the process.
        if (error_there := connection_error(address)) is not None:
            raise no_ray(address, error_there)
        try:
            with refused_by_ray(settings), users_secret_as_asked(address):
                ray.init(address=address, **{**_QUIET, **settings})
        except (ConnectionError, RayError) as error:
            if asks_for_a_secret(error):
                raise wrong_secret(address, bool(users_secret())) from error
            if isinstance(error, RayError):
                raise
            raise no_ray(address, error) from error
        self._connected = True
        if ray_address.is_meeting():
            ray_address.tell_address(address, "", self.shared)

    def words(self) -> str:
        if self.was_there:
            return "which this process is connected to"
        return f"at {self.address}" if self.address else "started for this run"

    def stop(self) -> None:
        if self._connected:
            self._connected = False
            ray.shutdown()
        if self._started is not None:
            self._started.close()
            self._started = None
        if not ray.is_initialized():
            ray_address.forget_what_ray_has_read()
        ray_address.forget_secret()


@contextmanager
def _loopback_stays(address: str) -> Iterator[None]:
    # Ray puts the network's address in the place of a loopback one, unless its switch for clusters is off. It has read
    # the switch when it was imported, so it is set here for the time of a start.
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    if address != ITSELF or before is None:
        yield
        return
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
