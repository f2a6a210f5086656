"""A worker group: one role on every rank. Its marked methods are the group's, spread and joined as they are marked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.controller.dispatch import Calls
from posttrain.controller.futures import Future


class WorkerGroup(ABC):
    """`group.method(...)` waits for the result; `group.later.method(...)` gives a Future; `group.on(rank).method(...)`
    asks one rank, and gives a Future."""

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
        method = self._marked(name)
        calls: Calls = method.spread(self, arguments)
        parts = [self._send(rank, name, own) for rank, own in enumerate(calls.arguments)]
        return self._joined(parts, lambda results: method.join(results, calls))

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
        return _View(self, lambda name, arguments: self._send(rank, name, arguments))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._marked(name)
        return lambda *arguments: self._waited_for(self.start(name, arguments))

    def _waited_for(self, call: Future) -> Any:
        if self.meanwhile is not None:
            self.meanwhile(call)
        return call.result()


class _View:
    """The marked methods of a group, called in another way."""

    def __init__(self, group: WorkerGroup, call: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._group, self._call = group, call

    def __getattr__(self, name: str) -> Any:
        self._group._marked(name)
        return lambda *arguments: self._call(name, arguments)
