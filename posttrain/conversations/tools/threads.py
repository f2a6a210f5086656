"""Plain functions of built-in tools and environments, each call in a daemon thread, so that none delays another.

A call that is given up leaves its thread behind. When too many of these threads are alive, further calls are refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from posttrain.conversations.tools.base import ToolFault
from posttrain.conversations.tools.marks import CURRENT

MOST_HUNG = 200


class Threads:
    """Runs functions for one tool."""

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
