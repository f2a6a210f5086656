"""Threads in which tools run, so that none delays another: one for each plain function, or for an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from posttrain.conversations.tools.base import ToolFault
from posttrain.conversations.tools.marks import CURRENT

MOST_HUNG = 200


class Threads:
    """Runs plain functions of one tool, each call in a daemon thread. A call that is given up leaves its thread behind;
    when too many of these are alive, further calls are refused."""

    def __init__(self) -> None:
        self.hung: set[threading.Thread] = set()

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the function returns or raises; cancelled, it is left to itself."""
        self.hung = {thread for thread in self.hung if thread.is_alive()}
        if len(self.hung) >= MOST_HUNG:
            raise ToolFault(f"It does not answer any more: {len(self.hung)} earlier calls of it hang.")
        loop, mark = asyncio.get_running_loop(), CURRENT.get()
        future = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():  # given up meanwhile
                return
            future.set_result(result) if error is None else future.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function(*args, **kwargs)
            except BaseException as raised:  # exit() in a tool ends its call, not the run
                error = raised if isinstance(raised, Exception) else RuntimeError(f"it raised {type(raised).__name__}")
                if isinstance(raised, StopIteration):
                    error = RuntimeError("it raised StopIteration")  # which no future takes
            if mark is not None:
                mark.set_thread(False)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        thread = threading.Thread(target=work, name=f"tool {getattr(function, '__name__', '')}", daemon=True)
        if mark is not None:
            mark.set_thread(True)
        thread.start()
        try:
            return await future
        except asyncio.CancelledError:
            self.hung.add(thread)
            raise


_REACTS_S = 0.5
_JOIN_S = 1.0


class LoopThread:
    """An event loop in a thread of its own; `start` returns at once.

    Callers wait in another loop, with a deadline. If this loop does not react after one, it is abandoned and the tool
    continues in a fresh one; calls in the old loop are answered by their own deadlines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begin()

    def _begin(self) -> None:
        loop = asyncio.new_event_loop()
        self.loop, self._thread = loop, threading.Thread(target=_serve, args=(loop,), name=self.name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """The future of a coroutine that runs in this loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def renew_if_stuck(self) -> None:
        """Begins a fresh loop if something blocks this one. Call it from another loop, after a deadline has passed."""
        loop, reacts = self.loop, asyncio.get_running_loop().create_future()
        ours = asyncio.get_running_loop()

        def react() -> None:
            ours.call_soon_threadsafe(lambda: reacts.done() or reacts.set_result(None))

        loop.call_soon_threadsafe(react)
        try:
            await asyncio.wait_for(reacts, _REACTS_S)
        except TimeoutError:
            if self.loop is loop:  # nobody else has noticed yet
                loop.call_soon_threadsafe(loop.stop)
                self._begin()

    def stop(self) -> None:
        """End the loop; one that is stuck is not waited for."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # Coroutines that were given up, and errors of a tool's own tasks, are the tool's business: nothing is printed.
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        loop.run_forever()
        waiting = asyncio.all_tasks(loop)
        for task in waiting:
            task.cancel()
        loop.call_later(_REACTS_S, loop.stop)
        if waiting:
            loop.run_until_complete(asyncio.gather(*waiting, return_exceptions=True))
    except RuntimeError:  # stopped before all had ended
        pass
    finally:
        loop.close()
