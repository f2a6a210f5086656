"""A worker group: one role on every rank. Its marked methods are the group's, spread and joined as they are marked.

Ranks may act as one, a team: where a method's mark says so (`register(..., team=...)`), whoever calls it sees as many
ranks as there are teams. Data is spread over these, `on(number)` asks a team, and each gives one answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.controller.dispatch import Calls, alone
from posttrain.controller.futures import Future


class WorkerGroup(ABC):
    """`group.method(...)` waits for the result; `group.later.method(...)` gives a Future; `group.on(rank).method(...)`
    asks one rank (or team, where several act as one), and gives a Future."""

    world_size: int
    overlaps: bool
    """Whether workers go on while the caller does something else."""
    config: Any
    """The settings that the workers were made with."""
    meanwhile: Callable[[Future], None] | None = None
    """What the caller does while it waits for a result; it comes back when that is there, or earlier."""

    @abstractmethod
    def _method(self, name: str) -> Any:
        """The worker class's function of that name; AttributeError if it has none."""

    @abstractmethod
    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future:
        """Start a call on one rank."""

    @abstractmethod
    def _joined(self, parts: list[Future], join: Callable[[list[Any]], Any]) -> Future:
        """One future of several."""

    @abstractmethod
    def wait_any(self, futures: Sequence[Future]) -> None:
        """Return as soon as one of them is done."""

    def _marked(self, name: str) -> Any:
        method = self._method(name)
        if not hasattr(method, "spread"):
            raise AttributeError(f"{name} is not marked for dispatch")
        return method

    def start(self, name: str, arguments: tuple[Any, ...]) -> Future:
        """Begin a call on the ranks that its mark says."""
        method, group = self._marked(name), self.teams(name)
        calls: Calls = method.spread(group, arguments)
        parts = [group._send(rank, name, own) for rank, own in enumerate(calls.arguments)]
        return group._joined(parts, lambda results: method.join(results, calls))

    def teams(self, name: str) -> WorkerGroup:
        """This group as a method's calls meet it: ranks that act as one in it are one."""
        size = getattr(self._marked(name), "team", alone)(self.config)
        return self if size == 1 else Teams(self, size)

    def once(self, name: str) -> Any:
        """The result of a call without arguments that never changes; it is made once."""
        known = vars(self).setdefault("_known", {})  # pyright: ignore
        if name not in known:
            known[name] = self.start(name, ()).result()
        return known[name]

    def hand_over(self, answer: Future, name: str, arguments: tuple[Any, ...] = ()) -> Future:
        """Begin a call on every rank with what one rank of another group answered, and these arguments; gives all
        results. The answer goes from worker to worker: it does not pass through the caller."""
        parts = [self._send_answer(rank, name, answer, arguments) for rank in range(self.world_size)]
        return self._joined(parts, lambda results: results)

    def _send_answer(self, rank: int, name: str, answer: Future, arguments: tuple[Any, ...]) -> Future:
        return self._send(rank, name, (answer.result(), *arguments))

    @property
    def later(self) -> Any:
        return _View(self, lambda name, arguments: self.start(name, arguments))

    def on(self, rank: int) -> Any:
        return _View(self, lambda name, arguments: self.teams(name)._send(rank, name, arguments))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._marked(name)
        return lambda *arguments: self._waited_for(self.start(name, arguments))

    def _waited_for(self, call: Future) -> Any:
        if self.meanwhile is not None:
            self.meanwhile(call)
        return call.result()


class Teams(WorkerGroup):
    """A group in which every `size` neighbouring ranks act as one: they are given the same, in the same order, so that
    they can wait for each other. The answer of a team is that of its first rank, or the first error of any."""

    def __init__(self, group: WorkerGroup, size: int) -> None:
        assert group.world_size % size == 0, f"{group.world_size} ranks are no teams of {size}"
        self.group, self.size = group, size
        self.world_size, self.config, self.overlaps = group.world_size // size, group.config, group.overlaps

    def _method(self, name: str) -> Any:
        return self.group._method(name)

    def _send(self, rank: int, name: str, arguments: tuple[Any, ...]) -> Future:
        ranks = range(rank * self.size, (rank + 1) * self.size)
        return self.group._joined([self.group._send(own, name, arguments) for own in ranks], lambda results: results[0])

    def _joined(self, parts: list[Future], join: Callable[[list[Any]], Any]) -> Future:
        return self.group._joined(parts, join)

    def wait_any(self, futures: Sequence[Future]) -> None:
        self.group.wait_any(futures)

    def once(self, name: str) -> Any:
        return self.group.once(name)


class _View:
    """The marked methods of a group, called in another way."""

    def __init__(self, group: WorkerGroup, call: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._group, self._call = group, call

    def __getattr__(self, name: str) -> Any:
        self._group._marked(name)
        return lambda *arguments: self._call(name, arguments)
