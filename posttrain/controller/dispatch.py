"""Marks on a worker's methods: how a call's data is spread over the ranks of a group, and how results are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass
class Calls:
    """The arguments of one call by rank. `rows` are the rows of the caller's batch that each rank was given, if any;
    `counted` are the ranks whose results count, where several were given the same ones."""

    arguments: list[tuple[Any, ...]]
    rows: Sequence[Sequence[int]] | None = None
    counted: Sequence[int] | None = None

    def those_that_count(self, results: list[Any]) -> list[Any]:
        return results if self.counted is None else [results[rank] for rank in self.counted]


# (the group, the arguments) -> the calls of its ranks
Spread = Callable[[Any, tuple[Any, ...]], Calls]
# (results by rank, the calls) -> what the caller gets
Join = Callable[[list[Any], Calls], Any]


def to_all(group: Any, arguments: tuple[Any, ...]) -> Calls:
    """The same arguments to every rank."""
    return Calls([arguments] * group.world_size)


def to_first(group: Any, arguments: tuple[Any, ...]) -> Calls:
    """To rank 0 alone: what all of them would answer alike."""
    return Calls([arguments])


def first(results: list[Any], calls: Calls) -> Any:
    """The answer of rank 0."""
    return results[0]


def all_of(results: list[Any], calls: Calls) -> list[Any]:
    """The answers of all ranks."""
    return results


def largest(results: list[dict[str, float]], calls: Calls) -> dict[str, float]:
    """By name, the largest number of any rank."""
    return {name: max(part[name] for part in results if name in part) for name in results[0]}


def alone(config: Any) -> int:
    """Every rank acts for itself."""
    return 1


def register(spread: Spread, join: Join = first, *, team: Callable[[Any], int] = alone) -> Callable[[Method], Method]:
    """Make a method callable through a worker group. `team` says, by the group's settings, how many neighbouring ranks
    act as one in it (`group.py`)."""

    def mark(method: Method) -> Method:
        method.spread, method.join, method.team = spread, join, team  # pyright: ignore
        return method

    return mark
