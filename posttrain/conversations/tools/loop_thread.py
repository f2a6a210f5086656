"""An event loop in a thread of its own: a tool of the trainer that blocks its loop delays no other tool.

Callers wait in another loop, with a deadline. If this loop does not react after one, it is abandoned and the tool
continues in a fresh one; calls in the old loop are answered by their own deadlines.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

_REACTS_S = 0.5
_JOIN_S = 1.0


class LoopThread:
    """Runs coroutines in its thread; `start` returns at once."""

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
