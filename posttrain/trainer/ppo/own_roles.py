"""Roles of a user's own trainer: a class of workers in a pool of its own, called from an overridden step.

class Judge:
    def __init__(self, config): ...

    def judge(self, data: DataProto) -> DataProto:      # some of the rows of the caller's batch
        return DataProto.from_dict({"judged": torch.ones(len(data))})

class Judged(RayPPOTrainer):
    own_roles = {"judge": OwnRole(Judge, n_workers=2)}

    def _score(self, batch):
        batch.union(self.own_wg["judge"].judge(batch))  # all rows, in order
        return super()._score(batch)

A class with `save(folder)` and `load(folder)` has its workers' state in every checkpoint:

    global_step_N/own_roles/judge/worker_0/      what worker 0 wrote
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import isfunction
from pathlib import Path
from typing import Any

from posttrain.checkpoint.folders import CheckpointError
from posttrain.config.trainer import ROLES
from posttrain.controller.group import Calls, WorkerGroup, register
from posttrain.controller.pool import RolePool
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.workers.update_plan import by_groups, in_row_order

BUILT_IN = ("rank", "actor", *ROLES)
STATE_METHODS = ("save", "load")
STATES = "own_roles"
"""The folder of a checkpoint, and the key of its `state.json`."""


def by_folder(group: WorkerGroup, folder: Path) -> Calls:
    """A folder of its own for every worker."""
    return Calls([(folder / f"worker_{number}",) for number in range(group.world_size)])


def _with_folder(method: Any) -> Any:
    """The method, whose folder exists when it is called."""

    @wraps(method)
    def call(worker: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        method(worker, folder)

    return register(by_folder)(call)


@dataclass(frozen=True)
class OwnRole:
    """`n_workers` processes of their own (0: the workers that train), each with one object `worker(config)`.

    Its public methods can be called through the group. One that has no mark of its own (`register`) takes a batch:
    every worker gets some of the rows, groups whole, and the results are joined in the caller's order.

    `save(folder)` and `load(folder)`, if it has them, write and read what a worker holds: each worker has a folder.
    """

    worker: type
    n_workers: int = 1

    def marked(self) -> type:
        """The class with a mark on every public method."""
        kinds = [vars(kind) for kind in reversed(self.worker.__mro__[:-1])]
        marked = {name for kind in kinds for name, method in kind.items() if hasattr(method, "spread")}
        plain = {
            name: _with_folder(method) if name in STATE_METHODS else _by_row(method)
            for kind in kinds
            for name, method in kind.items()
            if isfunction(method) and not name.startswith("_") and name not in marked
        }
        return type(self.worker.__name__, (self.worker,), {"__module__": self.worker.__module__, **plain})


def _by_row(method: Any) -> Any:
    """The method of a batch with its mark, and with errors about what it gives."""

    def join(results: list[Any], calls: Calls) -> DataProto:
        for (given,), made in zip(calls.arguments, results, strict=True):
            if not isinstance(made, DataProto) or len(made) != len(given):
                what = f"{len(made)} rows" if isinstance(made, DataProto) else f"a {type(made).__name__}"
                raise UserError(
                    f"{method.__qualname__} of an own role gave {what} for {len(given)} rows. It gives a DataProto "
                    "with a row for each that it gets; a method of another kind has a mark (docs/contracts.md)."
                )
        return in_row_order(results, calls)

    return register(by_groups, join)(method)


def pools_of_roles(roles: Mapping[str, OwnRole], owner: str) -> list[RolePool]:
    """The processes that the roles of a trainer's class ask for; `owner` is its name."""
    for name, role in roles.items():
        if name in BUILT_IN or not name.isidentifier():
            raise UserError(
                f"{owner}.own_roles: {name!r} is no name for a role of your own; take a word that is none of "
                f"{', '.join(BUILT_IN)}"
            )
        if not isinstance(role, OwnRole):
            raise UserError(f"{owner}.own_roles[{name!r}] is {role!r}: give OwnRole(CLASS, n_workers=NUMBER)")
        if not isinstance(role.worker, type) or not isinstance(role.n_workers, int) or role.n_workers < 0:
            raise UserError(
                f"{owner}.own_roles[{name!r}] is OwnRole({role.worker!r}, n_workers={role.n_workers!r}): give a class "
                "and a whole number of workers (0: those that train)"
            )
        if len(has := [method for method in STATE_METHODS if hasattr(role.worker, method)]) == 1:
            (lacks,) = set(STATE_METHODS) - set(has)
            raise UserError(
                f"{owner}.own_roles[{name!r}]: {role.worker.__name__} has {has[0]}(folder) but no {lacks}(folder), and "
                "a checkpoint needs both; add the other, or give the method another name"
            )
    return [
        RolePool(name, role.n_workers, f"{owner}.own_roles[{name!r}].n_workers")
        for name, role in roles.items()
        if role.n_workers
    ]


class RoleStates:
    """What the workers of a user's roles hold, as part of a checkpoint; of roles whose class has `save` and `load`."""

    def __init__(self, groups: Mapping[str, WorkerGroup], owner: str) -> None:
        self.owner = owner
        self.groups: dict[str, Any] = {
            name: group for name, group in groups.items() if hasattr(group.worker_class, STATE_METHODS[0])
        }

    def sizes(self) -> dict[str, int]:
        """By role, the number of its workers: they go on from as many folders."""
        return {name: group.world_size for name, group in self.groups.items()}

    def save(self, folder: Path) -> None:
        """Write all of them below the folder of a checkpoint."""
        self._call_all("save", folder)

    def load(self, folder: Path, sizes: Mapping[str, int]) -> None:
        """Go on from what was saved, where `sizes` are those of that time."""
        for name, group in self.groups.items():
            self._check(f"{self.owner}.own_roles[{name!r}]", name, group, folder, sizes)
        self._call_all("load", folder)

    def _call_all(self, method: str, folder: Path) -> None:
        calls = {name: getattr(group, method).later(folder / STATES / name) for name, group in self.groups.items()}
        for name, call in calls.items():
            self.groups[name].wait(call)

    def _check(self, place: str, name: str, group: WorkerGroup, folder: Path, sizes: Mapping[str, int]) -> None:
        if name not in sizes:
            kind = group.worker_class.__name__
            raise CheckpointError(
                f"The checkpoint {folder} holds no state of the role {name!r}, which {place} needs: {kind} has "
                f"{' and '.join(STATE_METHODS)}, and had none when it was saved, or the run had no such role. Remove "
                f"these methods from {kind} to let it begin anew, or start a new run (trainer.experiment_name)."
            )
        own_folders = group.marked(STATE_METHODS[1]).spread is by_folder
        if own_folders and sizes[name] != group.world_size:
            raise CheckpointError(
                f"The checkpoint {folder} holds the state of {sizes[name]} worker(s) of the role {name!r}, but this "
                f"run has {group.world_size}, and each goes on from its own: set {place} to n_workers={sizes[name]}, "
                "or start a new run (trainer.experiment_name)."
            )
