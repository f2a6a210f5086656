"""Retries: clients repeat a request that took too long or whose connection broke, and must not get a second sample."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from posttrain.conversations.serving.requests import Answer


@dataclass(eq=False)
class _Call:
    task: asyncio.Task[Answer]
    waiting: int = 0


class Retries:
    """Answers of the last requests. A repeated request joins the one under way, or gets its answer again. Without
    `aborts` a request goes on without its client, for a retry."""

    def __init__(self, most: int = 512, *, aborts: bool = True) -> None:
        self.most, self.aborts = most, aborts
        self.repeated = 0
        self._calls = OrderedDict[Hashable, _Call]()

    async def once(self, repeats: bool, key: Hashable, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer. The same body without the mark of a retry is a request of its own: a second sample."""
        call = self._calls.get(key) if repeats else None
        if call is None:
            call = _Call(asyncio.ensure_future(make()))  # pyright: ignore (a coroutine becomes a task)
            self._calls[key] = call
            self._calls.move_to_end(key)
            while len(self._calls) > self.most:
                self._calls.popitem(last=False)
        else:
            self.repeated += 1
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        except BaseException:
            failed = call.task.done() and (call.task.cancelled() or call.task.exception() is not None)
            if self._calls.get(key) is call and (failed or (self.aborts and call.waiting == 1)):
                del self._calls[key]  # what failed is not repeated to a client, which retries for another answer
            raise
        finally:
            call.waiting -= 1
            if (
                self.aborts and not call.waiting and not call.task.done()
            ):  # the last client has gone: no one reads the answer
                call.task.cancel()
