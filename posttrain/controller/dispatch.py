"""Marks on a worker's methods: how a call's data is spread over the ranks of a group, and how results are joined.

    class Critic:
        @register(by_passes, in_row_order)
        def compute_values(self, data: DataProto, passes: Passes | None = None) -> DataProto: ...

The mark is typed. A method that is spread `to_all` or `to_first` takes through its group what it takes itself; any
other takes what its spread function takes (here `data` alone: the passes are planned), and gives what its join gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from posttrain.controller.group import Calls, GroupMethod, RoleGroup

P = ParamSpec("P")
GroupP = ParamSpec("GroupP")
T = TypeVar("T")
R = TypeVar("R")
G = TypeVar("G")
Team = Callable[[Any], int]  # how many neighbouring ranks act as one in a method, by the group's settings


# -- spreading --------------------------------------------------------------------------------------------------------
class SameArguments:
    """The arguments as they are, to these ranks."""

    def __init__(self, *, every_rank: bool) -> None:
        self.every_rank = every_rank

    def __call__(self, group: Any, *arguments: Any) -> Calls:
        return Calls([arguments] * (group.world_size if self.every_rank else 1))


to_all = SameArguments(every_rank=True)
# To rank 0 alone: for questions that every rank would answer in the same way.
to_first = SameArguments(every_rank=False)


# -- joining ----------------------------------------------------------------------------------------------------------
def first(results: list[Any], calls: Calls) -> Any:
    """The answer of rank 0."""
    return results[0]


def all_of(results: list[T], calls: Calls) -> list[T]:
    """The answers of all ranks."""
    return results


def largest(results: list[dict[str, float]], calls: Calls) -> dict[str, float]:
    """By name, the largest number of any rank."""
    return {name: max(part[name] for part in results if name in part) for name in results[0]}


def alone(config: Any) -> int:
    """Every rank acts for itself."""
    return 1


# -- the mark ---------------------------------------------------------------------------------------------------------
class WorkerMethod(Generic[P, R, GroupP, G]):
    """A marked method: on a worker an ordinary method, on a `RoleGroup` the group's call. P and R are what the worker
    takes and gives, GroupP and G what a caller of the group gives and gets."""

    def __init__(self, function: Callable[..., Any], spread: Callable[..., Calls], join: Any, team: Team) -> None:
        update_wrapper(self, function)
        self.function, self.spread, self.join, self.team = function, spread, join, team

    @overload
    def __get__(self, instance: None, owner: type) -> WorkerMethod[P, R, GroupP, G]: ...
    @overload
    def __get__(self, instance: RoleGroup, owner: type) -> GroupMethod[GroupP, G, P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        if isinstance(instance, RoleGroup):
            # Found again by name in the workers' own class, which may be a subclass with a mark of its own.
            name = self.function.__name__
            return GroupMethod(instance.group_of(name), name)
        return MethodType(self.function, instance)

    def __call__(self, worker: Any, *arguments: P.args, **named: P.kwargs) -> R:
        """As a function, with the worker as its first argument."""
        return self.function(worker, *arguments, **named)


@overload
def register(
    spread: SameArguments, *, team: Team = alone
) -> Callable[[Callable[Concatenate[Any, P], R]], WorkerMethod[P, R, P, R]]: ...
@overload
def register(
    spread: SameArguments, join: Callable[[list[R], Calls], G], *, team: Team = alone
) -> Callable[[Callable[Concatenate[Any, P], R]], WorkerMethod[P, R, P, G]]: ...
@overload
def register(
    spread: Callable[Concatenate[Any, GroupP], Calls], *, team: Team = alone
) -> Callable[[Callable[Concatenate[Any, P], R]], WorkerMethod[P, R, GroupP, R]]: ...
@overload
def register(
    spread: Callable[Concatenate[Any, GroupP], Calls], join: Callable[[list[R], Calls], G], *, team: Team = alone
) -> Callable[[Callable[Concatenate[Any, P], R]], WorkerMethod[P, R, GroupP, G]]: ...
def register(spread: Any, join: Any = first, *, team: Team = alone) -> Any:
    """Make a method callable through a worker group."""
    return lambda method: WorkerMethod(method, spread, join, team)


def delegate(method: WorkerMethod[P, R, GroupP, G], to: str) -> WorkerMethod[P, R, GroupP, G]:
    """The same method of a worker that has the method's own worker as its attribute `to`."""

    def call(worker: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(getattr(worker, to), call.__name__)(*arguments, **named)

    update_wrapper(call, method.function)
    return WorkerMethod(call, method.spread, method.join, method.team)
