"""Ray for one run: started by itself, or found running; what was started here is gone with the run.

The machines of a Ray that the ranks of a run live on: which ones, and whether they have the same programs.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from posttrain import cores
from posttrain.controller import ray_address
from posttrain.controller.ray_address import (
    OWN,
    asks_for_a_secret,
    connection_error,
    given_address,
    no_ray,
    users_secret,
    users_secret_is_shown,
    wrong_secret,
)
from posttrain.controller.ray_node import RayHead, Watched
from posttrain.errors import UserError

ITSELF = "127.0.0.1"
WAIT_S = 60.0  # for machines that join late
COMING_S = 300.0  # for machines that join a head that has only just been started


class TooFewMachines(UserError):
    """The cluster has not as many machines as the run asks for, but `found`."""

    def __init__(self, text: str, found: int) -> None:
        super().__init__(text)
        self.found = found


@dataclass(frozen=True)
class Machine:
    """One of the cluster's. `address` is where its processes are found by the others of the run."""

    id: str
    address: str
    cores: int


def machines_for(
    count: int, each: int, device: str, tell: Callable[[str], None] = print, *, coming: bool = False
) -> list[Machine]:
    """`count` machines, each for `each` ranks on `device`: the command's own first, if it can, and one is always it.
    Others may join the cluster a while after the command was given, and do where all are only `coming`; the user is
    told who is waited for."""
    own = ray.get_runtime_context().get_node_id()
    if count == 1:
        return [Machine(own, ITSELF, cores.usable())]
    here = f"{{found}} of {count} are here" if coming else ""
    return _wait_for(
        lambda: choose_machines(ray.nodes(), own, count, each, device), COMING_S if coming else WAIT_S, tell, here
    )


def _wait_for(
    choose: Callable[[], list[Machine]], wait_s: float, tell: Callable[[str], None], here: str = ""
) -> list[Machine]:
    """What `choose` gives once enough machines have joined; `here` says how many have, instead of its error."""
    until, reported = time.monotonic() + wait_s, False
    while True:
        try:
            return choose()
        except TooFewMachines as error:
            if time.monotonic() > until:
                raise
            if not reported:
                tell(f"Waiting {wait_s:.0f} s for machines to join. {here.format(found=error.found) or error}.")
            reported = True
        time.sleep(1)


def rollout_machines(
    count: int, each: int, machines: Sequence[Machine], device: str, tell: Callable[[str], None] = print
) -> list[Machine]:
    """Where `count` further workers go beside the `each` on these machines. Free GPUs anywhere in the run's Ray
    are taken, those of the first machines first; on a CPU the machines themselves share them evenly."""
    if device != "cuda":
        return [machines[number % len(machines)] for number in range(count)]
    taken = dict.fromkeys([machine.id for machine in machines], each)
    return _wait_for(lambda: free_gpus(ray.nodes(), machines[0].id, count, taken), WAIT_S, tell)


def free_gpus(nodes: Sequence[Mapping[str, Any]], here: str, count: int, taken: Mapping[str, int]) -> list[Machine]:
    """`count` free GPUs of what Ray says of its nodes, `taken` by id are not; those of machines in use first."""
    alive = [node for node in nodes if node["Alive"]]
    ordered = sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeID"] not in taken, node["NodeID"]))
    free = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) - taken.get(node["NodeID"], 0) for node in ordered}
    found = [_machine(node) for node in ordered for _ in range(free[node["NodeID"]])]
    if len(found) < count:
        raise TooFewMachines(
            f"actor_rollout_ref.rollout.n_workers={count}: beside the workers that train, the Ray of this run has "
            f"{len(found)} free GPU(s) on {len(alive)} machine(s). Start Ray on further ones (ray start "
            "--address=HOST:6379) and name the cluster by RAY_ADDRESS; or lower one of the two numbers",
            found=len(found),
        )
    return found[:count]


def choose_machines(nodes: Sequence[Mapping[str, Any]], here: str, count: int, each: int, device: str) -> list[Machine]:
    """Of what Ray says of its nodes."""
    alive = [node for node in nodes if node["Alive"]]
    fit = [node for node in alive if device != "cuda" or node["Resources"].get("GPU", 0) >= each]
    if len(fit) < count:
        kind = f" with {each} GPU(s)" if device == "cuda" else ""
        raise TooFewMachines(
            f"trainer.nnodes={count}: the Ray of this run has {len(fit)} machine(s){kind}, {len(alive)} in all. Give "
            "the others the command with trainer.node_rank, or start Ray on them (ray start --address=HOST:6379) and "
            "name the cluster by RAY_ADDRESS; or lower trainer.nnodes",
            found=len(fit),
        )
    ordered = sorted(fit, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    return [_machine(node) for node in ordered[:count]]


def _machine(node: Mapping[str, Any]) -> Machine:
    return Machine(node["NodeID"], node["NodeManagerAddress"], max(1, int(node["Resources"].get("CPU", 1))))


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
        self.shared = shared  # a folder on a disk that all machines share: torchrun's hear of the secret there
        self.settings = as_arguments(settings or {})  # for `ray.init`, where they come before our own
        self._started: Watched | RayHead | None = None
        self._connected = False
        self.was_there = False  # whether this process had a Ray before: it is used, and left as it is
        self.folder = ""  # of the Ray that was started here

    @property
    def is_head(self) -> bool:
        """Whether the head was started here, so that the other machines are only coming now."""
        return isinstance(self._started, RayHead)

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
        # The address is tried first: where nothing answers, `ray.init` tries for two minutes and then ends the process.
        if (error_there := connection_error(address)) is not None:
            raise no_ray(address, error_there)
        try:
            with refused_by_ray(self.settings), users_secret_is_shown():
                ray.init(address=address, **{**_QUIET, **self.settings})
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
