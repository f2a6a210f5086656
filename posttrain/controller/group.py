"""A worker group: one worker of a class on every rank, called as one.

A group finds a method by its name in the worker class and reads from its mark (`register`) how arguments are
spread over the ranks and how results are joined. `LocalWorkerGroup` and `RayWorkerGroup` differ in how one rank is
called; what a role answers, with types, stands in `workers/groups.py`.

Neighbouring ranks may form a team, such as the ranks that hold one rollout engine together. For a method whose mark
says so (`register(..., team=...)`) a team counts as one rank: data is spread over teams, `group.method.on(number)`
calls a team, and each team gives one answer.

Marks on a worker's methods: how a call's data is spread over the ranks of a group, and how results are joined.

    class Critic:
        @register(by_passes, in_row_order)
        def compute_values(self, data: DataProto, passes: Passes | None = None) -> DataProto: ...

The mark is typed. A method that is spread `to_all` or `to_first` takes through its group what it takes itself; any
other takes what its spread function takes (here `data` alone: the passes are planned), and gives what its join gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from itertools import chain
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)
GroupP = ParamSpec("GroupP")
RankP = ParamSpec("RankP")
Joined = TypeVar("Joined")
Single = TypeVar("Single")
Answer = TypeVar("Answer")
RestP = ParamSpec("RestP")


class Future(ABC, Generic[T_co]):
    """The result of a call to workers."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `result` would return at once."""

    @abstractmethod
    def result(self) -> T_co:
        """What the call gave, or the error that it ended with; waits for it."""


@dataclass
class Calls:
    """The arguments of one call by rank. `rows` are the rows of the caller's batch that each rank was given, if any;
    `reporting_ranks` are those whose results are joined, where several ranks were given the same rows."""

    arguments: list[tuple[Any, ...]]
    rows: Sequence[Sequence[int]] | None = None
    reporting_ranks: Sequence[int] | None = None

    def ranks_by_arguments(self) -> list[list[int]]:
        """The ranks that were given one and the same arguments, in order of their first ranks."""
        found: dict[int, list[int]] = {}
        for rank, own in enumerate(self.arguments):
            found.setdefault(id(own), []).append(rank)
        return list(found.values())

    def reported(self, results: list[Any]) -> list[Any]:
        return results if self.reporting_ranks is None else [results[rank] for rank in self.reporting_ranks]


class WorkerGroup(ABC):
    """`group.method(...)` waits for the result; `group.method.later(...)` gives a Future; `group.method.on(rank, ...)`
    asks one rank (or team, where several act as one), and gives a Future."""

    worker_class: type
    world_size: int
    overlaps: bool  # whether workers go on while the caller does something else
    config: Any  # the settings that the workers were made with
    # What the caller does while it waits for a result; it comes back when that is there, or earlier.
    meanwhile: Callable[[Future[Any]], None] | None = None

    @abstractmethod
    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Start a call on one rank."""

    def _send_same(self, ranks: Sequence[int], name: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        """Start a call with the same arguments on several ranks; between processes these are packed once."""
        return [self._send(rank, name, arguments) for rank in ranks]

    @abstractmethod
    def _joined(self, parts: list[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
        """One future of several."""

    @abstractmethod
    def wait_any(self, futures: Sequence[Future[Any]]) -> None:
        """Return as soon as one of them is done."""

    def _send_answer(self, rank: int, name: str, answer: Future[Any], arguments: tuple[Any, ...]) -> Future[Any]:
        return self._send(rank, name, (answer.result(), *arguments))

    def marked(self, name: str) -> Any:
        """A method of the worker class that can be called through the group. One that overrides it without a mark of
        its own is called as the overridden one is marked."""
        for kind in self.worker_class.__mro__:
            if hasattr(vars(kind).get(name), "spread"):
                return vars(kind)[name]
        raise AttributeError(f"{self.worker_class.__name__}.{name} is not marked for dispatch")

    def start(self, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        """Begin a call on the ranks that its mark says."""
        method, group = self.marked(name), self.teams(name)
        calls: Calls = method.spread(group, *arguments)
        parts: dict[int, Future[Any]] = {}
        for ranks in calls.ranks_by_arguments():
            parts.update(zip(ranks, group._send_same(ranks, name, calls.arguments[ranks[0]]), strict=True))
        return group._joined([parts[rank] for rank in range(len(parts))], lambda results: method.join(results, calls))

    def wait(self, call: Future[Joined]) -> Joined:
        """The result of a call. One-step-off generation is driven from here: the next batch's requests are polled
        while this call's workers compute (`meanwhile`)."""
        if self.meanwhile is not None:
            self.meanwhile(call)
        return call.result()

    def teams(self, name: str) -> WorkerGroup:
        """This group as a method's calls meet it: ranks that act as one in it are one."""
        method = self.marked(name)
        size = method.team(self.config) if hasattr(method, "team") else 1
        return self if size == 1 else Teams(self, size)

    def once(self, name: str) -> Any:
        """The result of a call without arguments that never changes; it is made once."""
        # Kept by group, not by class: facts of one role (dtype, parallel sizes) are asked for in every call's spread.
        known = vars(self).setdefault("_known", {})  # pyright: ignore
        if name not in known:
            known[name] = self.start(name, ()).result()
        return known[name]

    def __getattr__(self, name: str) -> Any:
        """A marked method of whatever class the workers have, without types."""
        if name.startswith("_"):
            raise AttributeError(name)
        self.marked(name)
        return GroupMethod(self, name)


class GroupMethod(Generic[GroupP, Joined, RankP, Single]):
    """A worker's method as its group calls it, with arguments by place."""

    def __init__(self, group: WorkerGroup, name: str) -> None:
        self.group, self.name = group, name

    def __call__(self, *arguments: GroupP.args, **named: GroupP.kwargs) -> Joined:
        """Call it on the ranks that its mark says, and wait for the joined result."""
        return self.group.wait(self.later(*arguments, **named))

    def later(self, *arguments: GroupP.args, **named: GroupP.kwargs) -> Future[Joined]:
        """Begin the call; the result is waited for where it is needed."""
        self._refuse(named)
        return self.group.start(self.name, arguments)

    def on(self, rank: int, /, *arguments: RankP.args, **named: RankP.kwargs) -> Future[Single]:
        """Begin the call on one rank or team, with the arguments that the worker itself takes."""
        self._refuse(named)
        return self.group.teams(self.name)._send(rank, self.name, arguments)

    def _refuse(self, named: Mapping[str, Any]) -> None:
        if named:
            raise TypeError(f"{self.name}: a group takes arguments by place; give {', '.join(named)} without names")

    def hand_over(
        self: GroupMethod[GroupP, Joined, Concatenate[Answer, RestP], Single],
        answer: Future[Answer],
        *arguments: RestP.args,
        **named: RestP.kwargs,
    ) -> Future[list[Single]]:
        """Begin the call on every rank with what one rank of another group answered, and these arguments; gives all
        results. The answer goes from worker to worker: it does not pass through the caller."""
        self._refuse(named)
        group = self.group
        parts = [group._send_answer(rank, self.name, answer, arguments) for rank in range(group.world_size)]
        return group._joined(parts, lambda results: results)

    def once(self) -> Joined:
        """The result of a call without arguments that never changes."""
        return self.group.once(self.name)

    @property
    def world_size(self) -> int:
        """Ranks, or teams of them, that the call is spread over."""
        return self.group.teams(self.name).world_size


class RoleGroup:
    """A worker group with the types of its role's methods: a subclass lists them (`workers/groups.py`)."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    def group_of(self, name: str) -> WorkerGroup:
        """The group whose workers have this method."""
        return self.group

    @property
    def world_size(self) -> int:
        return self.group.world_size

    if not TYPE_CHECKING:  # to a type checker every misspelt call would be a method of the user's

        def __getattr__(self, name: str) -> Any:
            """A method that a worker class of the user's own has beside its role's."""
            if name.startswith("_") or name == "group":
                raise AttributeError(name)
            return getattr(self.group_of(name), name)


class GroupView(WorkerGroup):
    """The workers of another group, counted in another way."""

    def __init__(self, group: WorkerGroup, world_size: int) -> None:
        self.group, self.worker_class, self.world_size = group, group.worker_class, world_size
        self.config, self.overlaps = group.config, group.overlaps

    def _joined(self, parts: list[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
        return self.group._joined(parts, join)

    def wait_any(self, futures: Sequence[Future[Any]]) -> None:
        self.group.wait_any(futures)

    def once(self, name: str) -> Any:
        return self.group.once(name)


class FirstRanks(GroupView):
    """The first so many ranks of a group, as a group of their own."""

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self.group._send(rank, name, arguments)

    def _send_same(self, ranks: Sequence[int], name: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        return self.group._send_same(ranks, name, arguments)


class OneRank(GroupView):
    """One rank of a group, as a group of its own."""

    def __init__(self, group: WorkerGroup, number: int) -> None:
        super().__init__(group, 1)
        self.number = number

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        return self.group._send(self.number, name, arguments)

    def _send_answer(self, rank: int, name: str, answer: Future[Any], arguments: tuple[Any, ...]) -> Future[Any]:
        return self.group._send_answer(self.number, name, answer, arguments)


class Teams(GroupView):
    """A group in which every `size` neighbouring ranks count as one. All ranks of a team get the same calls in the same
    order, because they meet in collectives. A team's answer is that of its first rank, or the first error of any."""

    def __init__(self, group: WorkerGroup, size: int) -> None:
        assert group.world_size % size == 0, f"{group.world_size} ranks are no teams of {size}"
        super().__init__(group, group.world_size // size)
        self.size = size

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future[Any]:
        ranks = range(rank * self.size, (rank + 1) * self.size)
        return self.group._joined(self.group._send_same(ranks, name, arguments), lambda results: results[0])


P = ParamSpec("P")
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


def totals(results: list[dict[str, float]], calls: Calls) -> dict[str, float]:
    """By name, the sum over all ranks."""
    return {name: sum(part.get(name, 0) for part in results) for name in dict.fromkeys(chain.from_iterable(results))}


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
