"""Where the code of a tool runs: a thread of the trainer for the built-in tools, worker processes for all others.

A tool of a user may hang, crash or exit. In a worker process that costs the call that did it: the process is killed
and replaced, however often it happens. A worker has one call at a time, so it is always known which call is to blame.

Functions keep nothing between calls, so any worker serves any call. A `Tool` object keeps the state of conversations: a
conversation stays with one worker. When that process is lost, the conversation whose call did it starts anew, and is
told so at its next call. For the others the tool is opened in another process, where their calls are made once more;
if these may not be repeated (`repeatable`), such conversations start anew and are told so, too. A machine that is lost
takes all its processes with it: a call that was under way there fails.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any

from posttrain.conversations.tools.base import CallFailed, Tool, ToolAnswer, ToolFault, failure
from posttrain.conversations.tools.forks import ForkServer
from posttrain.conversations.tools.threads import LoopThread, Threads
from posttrain.conversations.tools.worker import invoke, own_error, serve_calls
from posttrain.machines.cluster import Places


class ToolHost(ABC):
    """Runs the methods of one tool, for the loop of the ToolRunner."""

    def __init__(self, tool: Tool, timeout_s: float) -> None:
        self.tool, self.timeout_s = tool, timeout_s

    @abstractmethod
    async def run(self, method: str, conversation: Hashable, given: Mapping[str, Any] | None = None) -> Any:
        """What `tool.METHOD(conversation)` gives; `given` are the arguments of `open` and `call`. TimeoutError at the
        deadline, ToolFault and CallFailed for what the tool raised."""

    def forget(self, conversation: Hashable) -> None:  # noqa: B027
        """A conversation has ended, whether or not the tool was told so."""

    async def shutdown(self) -> list[BaseException]:
        """Lets the tool end what it started; gives what it raised."""

        def end() -> BaseException | None:
            try:
                self.tool.shutdown()
            except BaseException as error:
                return error
            return None

        error = await Threads().run(end)
        return [] if error is None else [error]

    def close(self) -> None:  # noqa: B027
        """Leaves what still hangs to itself."""


class ThreadHost(ToolHost):
    """In an event loop of the trainer, in a thread of its own."""

    def __init__(self, tool: Tool, timeout_s: float) -> None:
        super().__init__(tool, timeout_s)
        self._thread = LoopThread(f"tool {tool.name}")

    async def run(self, method: str, conversation: Hashable, given: Mapping[str, Any] | None = None) -> Any:
        # Work that never began, because other work blocked the loop, is begun once more in a fresh one.
        for _ in range(2):
            began = threading.Event()
            work = _guarded(lambda: invoke(self.tool, method, conversation, given), began)
            future = asyncio.wrap_future(self._thread.start(work))
            done, _ = await asyncio.wait([future], timeout=self.timeout_s)
            if done:
                kind, value = future.result()
                if kind == "raised":
                    raise value
                return value
            future.cancel()
            await self._thread.renew_if_stuck()
            if began.is_set():
                break
        raise TimeoutError

    def close(self) -> None:
        self._thread.stop()


class ProcessHost(ToolHost):
    """In worker processes, at most `tool.at_once` of them, which are started when they are needed."""

    def __init__(self, tool: Tool, timeout_s: float, places: Places) -> None:
        super().__init__(tool, timeout_s)
        self.places = places
        self._started: list[_Process] = []
        self._idle: list[_Process] = []
        self._homes: list[_Process] = []  # with the state of conversations
        self._homes_by: dict[Hashable, _Process] = {}
        self._given: dict[Hashable, dict[str, Any]] = {}  # by conversation, what its row gives the tool
        # By conversation, its calls since the tool was opened for it: they are repeated where its process is lost.
        self._calls: dict[Hashable, list[Mapping[str, Any] | None]] = {}
        # Conversations whose own call ended their process, and how: they are told at their next call.
        self._lost: dict[Hashable, str] = {}

    async def run(self, method: str, conversation: Hashable, given: Mapping[str, Any] | None = None) -> Any:
        if method == "open":
            self._given[conversation] = dict(given or {})
        if self.tool.stateless:
            return await self._run_stateless(method, conversation, given)
        if method != "close":
            return await self._run_pinned(method, conversation, given)
        lost, home = self._lost.pop(conversation, None), self._homes_by.get(conversation)
        return None if lost or home is None else await self._run_pinned(method, conversation, given)

    def forget(self, conversation: Hashable) -> None:
        self._given.pop(conversation, None)
        self._lost.pop(conversation, None)
        self._calls.pop(conversation, None)
        if home := self._homes_by.pop(conversation, None):
            home.conversations.discard(conversation)

    async def _run_stateless(self, method: str, conversation: Hashable, given: Mapping[str, Any] | None) -> Any:
        if method != "call":  # what a row gives its tool is sent with each call
            return None
        process = self._idle_process()
        try:
            return await process.ask("once", conversation, (self._given.get(conversation), given), self.timeout_s)
        finally:
            if not process.lost:
                self._idle.append(process)

    def _idle_process(self) -> _Process:
        """A process without work. One that the kernel has killed meanwhile, for its memory, is not blamed on a call."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
        return self._start()

    async def _run_pinned(self, method: str, conversation: Hashable, given: Mapping[str, Any] | None) -> Any:
        if lost := self._lost.pop(conversation, None):
            raise CallFailed(
                "ended", f"its process was lost ({lost}) with what it kept for this conversation; it starts anew"
            )
        while True:
            home = self._homes_by.get(conversation)
            is_new = home is None
            if home is None:
                home = self._homes_by[conversation] = self._choose_home()
                home.conversations.add(conversation)
            async with home.lock:
                if not home.lost and not home.is_alive():  # it ended between two calls: none of them is to blame
                    self._leave(home)
                if home.lost:  # a call before this one took the process with it
                    if conversation not in self._lost:
                        continue
                    return await self._run_pinned(method, conversation, given)
                try:
                    if is_new and method != "open":
                        await self._repeat(home, conversation)
                    return await home.ask(method, conversation, given, self.timeout_s)
                finally:
                    if home.lost:
                        self._leave(home)
                        if self._calls.pop(conversation, None) or method == "call":
                            self._lost[conversation] = home.lost
                    elif method == "call":
                        self._calls.setdefault(conversation, []).append(given)

    async def _repeat(self, home: _Process, conversation: Hashable) -> None:
        """Gives a process the state of a conversation that another one had before."""
        if conversation in self._given:
            await home.ask("open", conversation, self._given[conversation], self.timeout_s)
        for given in self._calls.get(conversation, ()):
            try:
                await home.ask("call", conversation, given, self.timeout_s)
            except (ToolFault, CallFailed):  # as it did before
                if home.lost:
                    raise

    def _leave(self, home: _Process) -> None:
        """Sends the conversations of a process that is lost to others."""
        if home in self._homes:
            self._homes.remove(home)
        for one in home.conversations:
            self._homes_by.pop(one, None)
            if not self.tool.repeatable and self._calls.pop(one, None):
                self._lost[one] = home.lost

    def _choose_home(self) -> _Process:
        if len(self._homes) < self.tool.at_once:
            self._homes.append(self._start())
            return self._homes[-1]
        return min(self._homes, key=lambda one: len(one.conversations))

    def _start(self) -> _Process:
        self._started = [one for one in self._started if not one.lost]
        self._started.append(_Process(self.tool.name, self.places.start(one.worker for one in self._started)))
        return self._started[-1]

    async def shutdown(self) -> list[BaseException]:
        # A process that is still at a call hangs: it is killed.
        processes = [*self._idle, *(one for one in self._homes if not one.lock.locked())]
        if not processes:
            return await super().shutdown()  # what the tool started when it was made itself
        asked = (one.ask("shutdown", None, None, self.timeout_s) for one in processes)
        return [
            done for done in await asyncio.gather(*asked, return_exceptions=True) if isinstance(done, BaseException)
        ]

    def close(self) -> None:
        for one in self._started:
            one.kill()


class _Process:
    """One worker, at one call after the other."""

    def __init__(self, name: str, worker: Any) -> None:
        self.name, self.worker = name, worker
        self.lock = asyncio.Lock()
        self.conversations = set[Hashable]()
        self.lost = ""  # how the process ended

    async def ask(self, method: str, conversation: Hashable, given: Any, timeout_s: float) -> Any:
        """The tool's answer. A process that gives none within its time, or ends, is lost."""
        try:
            self.worker.channel.send((self.name, method, conversation, given))
            kind, value = await asyncio.wait_for(self._answer(), timeout_s)
        except TimeoutError:
            self._end(f"no answer within {timeout_s:g} seconds")
            raise
        except (EOFError, OSError):
            words = self._end()
            raise CallFailed("ended", f"its process ended ({words})") from None
        except BaseException:  # cancelled: what the process is doing is not known
            self._end("given up")
            raise
        if kind == "said":
            raise ToolFault(value)
        if kind != "gave":
            raise CallFailed(kind, value)
        return value

    async def _answer(self) -> tuple[str, Any]:
        channel, loop = self.worker.channel, asyncio.get_running_loop()
        while True:
            for message in channel.receive():
                if message[0] != "print":
                    return message
                print(message[1])
            if channel.ended or channel.broken:
                raise EOFError
            readable = asyncio.Event()
            loop.add_reader(channel.fileno(), readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(channel.fileno())

    def is_alive(self) -> bool:
        self.worker.channel.receive()  # what the tool printed behind its answer is dropped
        if self.worker.channel.ended or self.worker.channel.broken:
            self._end()
        return not self.lost

    def kill(self) -> None:
        if not self.lost:
            self._end("the run ended")

    def _end(self, words: str = "") -> str:
        self.lost = words or self.worker.ended().text
        self.worker.kill()
        return self.lost


async def _guarded(work: Callable[[], Coroutine[Any, Any, Any]], began: threading.Event) -> tuple[str, Any]:
    """The result, or the error as a value: nothing that a tool raises is taken for a deadline or an end of ours."""
    began.set()
    try:
        return "gave", await work()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return "raised", RuntimeError("it was cancelled")
    except BaseException as error:
        return "raised", own_error(error)


def read_answer(name: str, said: Any, seconds: float) -> ToolAnswer:
    """What a tool returned, as an answer."""
    if isinstance(said, ToolAnswer):
        error = said.error if said.error is None or said.error.startswith("said:") else f"said: {said.error}"
        metrics = {str(name): float(value) for name, value in said.metrics.items()}
        took = _finite("time", said.seconds or seconds)
        if (cost := _finite("cost", said.cost)) < 0:
            raise ValueError(f"its cost is {cost}")
        return ToolAnswer(str(said.text), error, _finite("reward", said.reward), metrics, took, cost)
    if isinstance(said, str):
        return ToolAnswer(said, seconds=seconds)
    words = f"it gave a {type(said).__name__}, no text"
    return failure("raised", f"The tool {name} failed: {words}.", words, seconds=seconds)


def _finite(what: str, value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"its {what} is {number}")
    return number


def host_tools(tools: Mapping[str, Tool], timeout_s: float) -> tuple[dict[str, ToolHost], ForkServer | None]:
    """(the host of each tool, the parent of their worker processes if any needs one)."""
    isolated = [name for name, tool in tools.items() if tool.isolated and hasattr(os, "fork")]
    server = ForkServer(lambda channel, _: serve_calls(channel, tools)) if isolated else None
    places = Places(server.start, 1) if server else None
    return {
        name: ProcessHost(tool, timeout_s, places) if places and tool.isolated else ThreadHost(tool, timeout_s)
        for name, tool in tools.items()
    }, server
