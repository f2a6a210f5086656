"""One engine for many conversations at once: each awaits its next turn, and all turns are decoded together.

    async with Server(engine) as server:
        output = await server.generate(Request(...))

The engine works in a thread of its own, and only that thread calls it. New requests are admitted between two of its
steps, so that a conversation does not wait for the others' turns to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

from posttrain.rollout.base import Output, Request, RolloutEngine
from posttrain.rollout.generate import JOIN_S, advance


class Server:
    """`generate(request)` for any number of tasks of one event loop."""

    def __init__(self, engine: RolloutEngine) -> None:
        if engine.ranks > 1:
            raise ValueError(
                f"{engine.ranks} processes hold this engine, and step together: a server, which lets requests in as "
                "they come, is for an engine of one process"
            )
        self.engine = engine
        self._waiting: dict[Hashable, asyncio.Future[Output]] = {}
        self._new: list[Request] = []
        self._given_up: set[Hashable] = set()
        self._released: list[Hashable] = []
        self._streams: dict[Hashable, Callable[[Output], None]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Server:
        self._thread = ThreadPoolExecutor(1, "rollout")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Requests that are still under way are aborted."""
        for future in list(self._waiting.values()):
            future.cancel()
        if self._driver is not None:
            await self._driver
        self._thread.shutdown()

    async def generate(self, request: Request, on_progress: Callable[[Output], None] | None = None) -> Output:
        """The response. A cancelled call aborts its request. An error of `submit` is raised in the call that made the
        request, an error of a step in all calls that wait. `on_progress` is called in this event loop with what the
        response has so far, as often as the engine can tell."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is under way already")
        future = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._new.append(request)
        if on_progress is not None:
            self._streams[request.id] = on_progress
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.get(request.id) is future:  # it has not ended meanwhile, which frees its id
                self._given_up.add(request.id)
            raise
        finally:
            self._streams.pop(request.id, None)

    def release(self, id: Hashable) -> None:
        """Free the KV cache of an ended request that was to be kept, before the engine's next step."""
        self._released.append(id)

    async def _drive(self) -> None:
        """Run the engine as long as a call waits. It is called nowhere else."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            new, self._new = self._new, []
            given_up, self._given_up = self._given_up, set()
            released, self._released = self._released, []
            try:
                ended, refused = await loop.run_in_executor(self._thread, self._work, loop, new, given_up, released)
            except Exception as error:
                self._fail(error)
                return
            for output in ended:
                future = self._waiting.pop(output.id)
                if not future.done():
                    future.set_result(output)
            for id, error in refused.items():
                future = self._waiting.pop(id)
                if not future.done():
                    future.set_exception(error)

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        new: list[Request],
        given_up: set[Hashable],
        released: list[Hashable],
    ) -> tuple[list[Output], dict[Hashable, Exception]]:
        """In the engine's thread: admit and abort, then decode until a request ended, came or was cancelled; gives what
        ended, and what was rejected."""
        refused: dict[Hashable, Exception] = {}
        for request in new:
            try:
                self.engine.submit(request)
            except Exception as error:
                refused[request.id] = error
        gone = self.engine.abort(given_up) if given_up else []
        if released:
            self.engine.release(released)
        if gone or refused:
            return gone, refused

        def others_came() -> bool:
            streams = dict(self._streams)  # a copy: the event loop's thread changes it
            for output in self.engine.so_far(streams.keys()) if streams else ():
                loop.call_soon_threadsafe(streams[output.id], output)
            # While the device is busy, requests that arrive can still join the next step.
            while not self._has_news and (left := self.engine.ahead_s()) > 0:
                time.sleep(min(left, JOIN_S))
            return self._has_news

        return advance(self.engine, until=others_came), refused

    @property
    def _has_news(self) -> bool:
        return bool(self._new or self._given_up)

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        self._new, self._given_up = [], set()
        try:
            self.engine.abort(waiting)
        finally:  # also where the engine cannot even abort: no call may wait forever
            for future in waiting.values():
                if not future.done():
                    future.set_exception(error)
