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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from posttrain.config.pools import ROLES
from posttrain.controller.group import Calls, register
from posttrain.controller.pool import RolePool
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.workers.update_plan import by_groups, in_row_order

BUILT_IN = ("rank", "actor", *ROLES)


@dataclass(frozen=True)
class OwnRole:
    """`n_workers` processes of their own (0: the workers that train), each with one object `worker(config)`.

    Its public methods can be called through the group. One that has no mark of its own (`register`) takes a batch:
    every worker gets some of the rows, groups whole, and the results are joined in the caller's order.
    """

    worker: type
    n_workers: int = 1

    def marked(self) -> type:
        """The class with a mark on every public method."""
        kinds = [vars(kind) for kind in reversed(self.worker.__mro__[:-1])]
        marked = {name for kind in kinds for name, method in kind.items() if hasattr(method, "spread")}
        plain = {
            name: _by_row(method)
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
    return [
        RolePool(name, role.n_workers, f"{owner}.own_roles[{name!r}].n_workers")
        for name, role in roles.items()
        if role.n_workers
    ]
