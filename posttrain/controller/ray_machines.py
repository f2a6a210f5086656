"""The machines of a Ray that the ranks of a run live on: which ones, and whether they have the same programs."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from posttrain import cores
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
