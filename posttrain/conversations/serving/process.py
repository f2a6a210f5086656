"""The process that speaks HTTP, beside the process of the engine.

Requests are parsed, rendered, tokenized and matched to earlier turns there, and answers written: none of that shares
Python's lock with the engine's loop. The two speak over a `Link`. The HTTP process is forked from a parent that was
forked before the model was loaded (`tools/forks.py`), so that it starts at once, and can be replaced. It ends when this
process does, however that ends.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from posttrain.conversations.serving.wire import Link, Receive
from posttrain.conversations.tools.forks import ForkServer, Worker
from posttrain.machines.channel import Channel

_BACKLOG = 4096
_CLOSING_S = 0.5
# A process that ends so soon so often cannot work: starting it for ever would hang the run.
_SHORT_S, _MOST_SHORT_LIVES = 1.0, 3

MakeApp = Callable[[Link, dict[str, Any]], tuple[web.Application, Receive]]
"""Makes the application in its process, and what takes the messages of the engine's process. It is given what
`ServerProcess.start` was."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for connections; OSError where the address is taken. Port 0 takes any that is free."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError:
        found.close()
        raise
    return found


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class ServerProcess:
    """The HTTP process of a listening socket. Make it before the model is loaded and before threads are started.
    `start` begins it, and begins another one where the last is lost: clients that connect meanwhile wait."""

    def __init__(self, listener: socket.socket, make: MakeApp) -> None:
        self.listener = listener
        self._forks = ForkServer(lambda channel, _: _run(channel, listener, make))
        self._freezes = not gc.get_freeze_count()
        if self._freezes:  # a full collection takes a third of a second in this process, mostly for what was imported
            gc.collect()  # garbage that is frozen stays until the end: after a restart, tensors of the run before
            gc.freeze()
        self._worker: Worker | None = None
        self._short_lives = 0
        self.link: Link | None = None

    def start(self, facts: dict[str, Any], receive: Receive, lost: Callable[[str], None]) -> Link:
        """Starts the process, with `facts` for its application, and reads its messages in the running event loop.
        `lost` is called with how it ended, if that is not by `close`. RuntimeError if it cannot be started."""
        if self._short_lives >= _MOST_SHORT_LIVES:
            raise RuntimeError(f"it ended {self._short_lives} times as soon as it was started")
        worker, born = self._forks.start(), time.monotonic()
        self._worker = worker

        def end() -> None:
            self._worker = self.link = None
            self._short_lives = self._short_lives + 1 if time.monotonic() - born < _SHORT_S else 0
            worker.kill()
            lost(worker.ended().text)

        link = self.link = Link(worker.channel.socket, receive, end)
        link.post([facts])
        link.open()
        return link

    def close_link(self) -> None:
        """The process finishes what it writes, and ends. Call it in the event loop of `start`."""
        if self.link is not None:
            self.link.close()

    def close(self) -> None:
        """Ends the process and its parent, with nothing left behind."""
        self.listener.close()
        if self._worker is not None:
            with suppress(OSError):
                self._worker.channel.close()
        self._forks.close()
        if self._freezes:
            gc.unfreeze()


def _run(channel: Channel, listener: socket.socket, make: MakeApp) -> None:
    # Ledgers of many sessions are so many objects that the usual collections take a good part of the time.
    gc.set_threshold(100_000, 50, 100)
    try:
        asyncio.run(_serve(channel, listener, make))
    except Exception:  # a forked process ends without a word otherwise
        traceback.print_exc()


async def _serve(channel: Channel, listener: socket.socket, make: MakeApp) -> None:
    """All that the HTTP process does, until the other end of its channel is closed."""
    loop = asyncio.get_running_loop()
    begun: asyncio.Future[web.Application] = loop.create_future()
    ended: asyncio.Future[None] = loop.create_future()
    receive: Receive | None = None

    def take(words: list[Any], ids: list[int], values: list[float]) -> None:
        nonlocal receive
        if receive is not None:
            receive(words, ids, values)
            return
        try:
            app, receive = make(link, words[0])
            begun.set_result(app)
        except Exception as error:
            begun.set_exception(error)

    link = Link(channel.socket, take, lambda: ended.set_result(None))
    link.open()
    await asyncio.wait([begun, ended], return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        return
    runner = web.AppRunner(await begun, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_S)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=_BACKLOG).start()
    await ended
    await runner.cleanup()
