"""Runs tool calls beside the rollout: `answer` returns at once, with a future.

Everything that waits for a tool does so in one event loop, which runs no code of tools: that runs in worker processes,
or in a thread of its own for tools that are built in (`hosts.py`). So whatever a tool does, every call has its answer
soon after its deadline.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from posttrain import cores
from posttrain.conversations.settings import SIDES
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import (
    Tool,
    ToolAnswer,
    ToolCall,
    ToolFault,
    describe_error,
    failure,
    presented,
    redacted,
)
from posttrain.conversations.tools.hosts import ProcessHost, ToolHost, host_tools, read_answer
from posttrain.conversations.tools.threads import LoopThread
from posttrain.machines.cluster import Machine, Places

TOOLS_KIND = "tools"
"""The kind of worker processes that a machine is prepared for."""
# Calls of tools that do not exist are counted together, because a model may invent any number of names.
UNKNOWN = "(unknown)"
# Kinds of errors of a call. `close` and `reward` are errors of conversations, `shutdown` of the run.
ERRORS = ("arguments", "ended", "open", "raised", "said", "timeout", "unknown")


class Counts:
    """How often each tool was called and which errors it had: for metrics, and for a warning when no call succeeds.

    By tool: `calls`, and each kind of error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_tool: dict[str, Counter[str]] = {}
        # By tool and kind; the kind `calls` has the last error of any call.
        self.last_error: dict[tuple[str, str], str] = {}

    def add(self, tool: str, kind: str, words: str = "") -> None:
        with self._lock:
            self.by_tool.setdefault(tool, Counter())[kind] += 1
            if words:
                self.last_error[tool, kind] = words
                if kind in ERRORS:
                    self.last_error[tool, "calls"] = words

    def failed(self, tool: str) -> int:
        """Calls of a tool that ended in an error."""
        counts = self.by_tool.get(tool, Counter())
        return sum(counts[kind] for kind in ERRORS)

    def troubles(self) -> list[str]:
        """One sentence for each tool of which no call has succeeded, and for errors at the end of conversations."""
        said = list[str]()
        for tool, counts in sorted(self.by_tool.items()):
            calls = counts["calls"]
            if tool != UNKNOWN and calls and self.failed(tool) >= calls:
                kinds = ", ".join(f"{counts[kind]} {kind}" for kind in ERRORS if counts[kind])
                said.append(f"all {calls} calls of the tool {tool} failed ({kinds}); the last: {self._last(tool)}")
            for kind in ("close", "reward", "shutdown"):
                if counts[kind]:
                    said.append(
                        f"`{kind}` of the tool {tool} failed {counts[kind]} times; the last: {self._last(tool, kind)}"
                    )
        return said

    def _last(self, tool: str, kind: str = "calls") -> str:
        return self.last_error.get((tool, kind), "")


# When the runner ends, conversations that are still open have so many seconds together to be closed.
_CLOSING_S = 5.0


class ToolRunner:
    """Runs the calls of all conversations; a context manager. No tool can end or hang it."""

    def __init__(self, tools: Mapping[str, Tool], *, timeout_s: float, max_chars: int, side: str) -> None:
        """`timeout_s` is for one call; answers longer than `max_chars` are cut at `side` (see `answers.cut`)."""
        if side not in SIDES or max_chars < 1 or timeout_s <= 0:
            raise ValueError(f"side={side!r}, max_chars={max_chars}, timeout_s={timeout_s}")
        self.tools, self.counts = dict(tools), Counts()
        self._timeout_s, self._max_chars, self._side = timeout_s, max_chars, side
        self._opened: dict[Hashable, dict[str, asyncio.Task[str | None]]] = {}
        self._ending: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._hosts, self._server = host_tools(self.tools, timeout_s)
        self._places = {name: asyncio.Semaphore(tool.at_once) for name, tool in tools.items()}
        self._own = LoopThread("tools")

    def open(self, conversation: Hashable, given: Mapping[str, Mapping[str, Any]]) -> None:
        """A conversation begins; `given` are its row's own arguments, by tool. Returns at once."""
        self._own.start(self._open(conversation, {name: dict(given.get(name) or {}) for name in self.tools}))

    def answer(self, conversation: Hashable, calls: Sequence[ToolCall]) -> Future[list[ToolAnswer]]:
        """The answers to these calls, which run side by side, in order."""
        if self._closed:
            raise RuntimeError("this ToolRunner is closed")
        return self._own.start(self._answer_all(conversation, list(calls)))

    def reward(self, conversation: Hashable) -> float:
        """What the whole conversation earns by its tools; asked before it is closed. An error counts, and earns 0."""
        asked = [name for name, tool in self.tools.items() if _overrides(tool, "reward")]
        return self._own.start(self._reward(conversation, asked)).result() if asked else 0.0

    def close_conversation(self, conversation: Hashable) -> None:
        """A conversation has ended. Returns at once; errors are counted, not raised."""
        self._own.start(self._close(conversation))

    def close(self) -> None:
        """End everything. What hangs is left to itself."""
        if self._closed:
            return
        self._closed = True
        with suppress(TimeoutError):
            self._own.start(self._close_all()).result(2 * _CLOSING_S)
        self._shut_down()
        self._own.stop()
        if self._server is not None:
            self._server.close()

    def check(self) -> None:
        """UserError where no worker processes can be started any more: all calls would fail."""
        if self._server is not None:
            self._server.check("tools")

    @property
    def isolated(self) -> list[str]:
        """Tools that run in worker processes."""
        return [name for name, host in self._hosts.items() if isinstance(host, ProcessHost)]

    def spread(self, machines: Sequence[Machine]) -> None:
        """Start worker processes on these machines as well, in proportion to their cores. They were prepared for the
        kind `tools`."""
        assert self._server is not None
        places = Places(self._server.start, cores.usable(), TOOLS_KIND, [(one, one.cores) for one in machines])
        for host in self._hosts.values():
            if isinstance(host, ProcessHost):
                host.places = places

    def _shut_down(self) -> None:
        """All tools side by side; one that raises is counted, one that hangs is left to itself, or killed."""

        async def one(name: str, host: ToolHost) -> None:
            with suppress(TimeoutError):
                for error in await asyncio.wait_for(host.shutdown(), _CLOSING_S):
                    self._count(name, "shutdown", error)
            host.close()

        async def every() -> None:
            await asyncio.gather(*(one(name, host) for name, host in self._hosts.items()))

        with suppress(TimeoutError):
            self._own.start(every()).result(2 * _CLOSING_S)

    def _count(self, name: str, kind: str, error: BaseException) -> None:
        """An error of a conversation or of the end, which has no answer to be told in."""
        try:
            words = redacted(describe_error(error), self.tools[name].secrets)
        except Exception:  # secrets that are no texts
            words = type(error).__name__
        self.counts.add(name, kind, f"{kind}: {words}")

    def __enter__(self) -> ToolRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs in the runner's own loop.

    async def _answer_all(self, conversation: Hashable, calls: list[ToolCall]) -> list[ToolAnswer]:
        return list(await asyncio.gather(*(self._answer(conversation, call) for call in calls)))

    async def _answer(self, conversation: Hashable, call: ToolCall) -> ToolAnswer:
        tool = self.tools.get(call.name) if isinstance(call.name, str) else None
        name = UNKNOWN if tool is None else call.name
        try:
            answer = await self._ask(tool, conversation, call) if tool is not None else self._no_such(call.name)
        except Exception as error:  # a schema that is none, metrics that are no dict
            answer = failure("raised", f"The tool {call.name} is broken.", describe_error(error))
        answer = self._presented(answer, tool)
        self.counts.add(name, "calls")
        if answer.error is not None:
            self.counts.add(name, answer.error.partition(":")[0], answer.error)
        return answer

    def _presented(self, answer: ToolAnswer, tool: Tool | None) -> ToolAnswer:
        try:
            return presented(answer, () if tool is None else tool.secrets, self._max_chars, self._side)
        except Exception as error:  # secrets that are no texts: nothing that it said may be shown then
            words = f"its secrets cannot be taken out: {type(error).__name__}"
            return failure("raised", "The tool is broken.", words, seconds=answer.seconds)

    def _no_such(self, name: str) -> ToolAnswer:
        known = ", ".join(self.tools)
        return failure("unknown", f"There is no tool {str(name)[:80]!r}; there are: {known}.")

    async def _ask(self, tool: Tool, conversation: Hashable, call: ToolCall) -> ToolAnswer:
        try:
            arguments = convert_arguments(tool.name, tool.schema["function"].get("parameters") or {}, call.arguments)
        except ArgumentError as error:
            return failure("arguments", str(error))
        problem = await self._problem_of_opening(conversation, call.name)
        if problem:
            return self._not_open(call.name, problem)
        async with self._places[call.name]:
            start = time.perf_counter()
            try:
                said = await self._hosts[call.name].run("call", conversation, arguments)
            except TimeoutError:
                text = f"The tool {call.name} gave no answer within {self._timeout_s:g} seconds."
                return failure("timeout", text, seconds=time.perf_counter() - start)
            except ToolFault as error:
                return failure("said", str(error), seconds=time.perf_counter() - start)
            except Exception as error:
                kind, words = getattr(error, "kind", "raised"), describe_error(error)
                if kind == "open":
                    return self._not_open(call.name, words)
                text = f"The tool {call.name} failed: {words.rstrip('.')}."
                return failure(kind, text, words, seconds=time.perf_counter() - start)
            return read_answer(call.name, said, time.perf_counter() - start)

    def _not_open(self, name: str, problem: str) -> ToolAnswer:
        return failure("open", f"The tool {name} is not available in this conversation.", problem)

    async def _open(self, conversation: Hashable, given: dict[str, dict[str, Any]]) -> None:
        asked = [name for name, tool in self.tools.items() if _overrides(tool, "open")]
        self._opened[conversation] = {
            name: asyncio.create_task(self._open_one(name, conversation, given[name])) for name in asked
        }

    async def _open_one(self, name: str, conversation: Hashable, given: dict[str, Any]) -> str | None:
        """Why the tool could not be opened; None if it could."""
        try:
            await self._hosts[name].run("open", conversation, given)
        except TimeoutError:
            return f"`open` gave no answer within {self._timeout_s:g} s"
        except Exception as error:
            return describe_error(error)
        return None

    async def _problem_of_opening(self, conversation: Hashable, name: str) -> str | None:
        task = self._opened.get(conversation, {}).get(name)
        return None if task is None else await task

    async def _reward(self, conversation: Hashable, names: list[str]) -> float:
        async def one(name: str) -> float:
            if await self._problem_of_opening(conversation, name):
                return 0.0
            try:
                reward = float(await self._hosts[name].run("reward", conversation))
                if not math.isfinite(reward):
                    raise ValueError(f"the reward is {reward}")
                return reward
            except Exception as error:
                self._count(name, "reward", error)
                return 0.0

        return sum(await asyncio.gather(*(one(name) for name in names)))

    async def _close(self, conversation: Hashable) -> None:
        async def one(name: str, opening: asyncio.Task[str | None] | None) -> None:
            if opening is not None and await opening is not None:
                return
            try:
                await self._hosts[name].run("close", conversation)
            except Exception as error:
                self._count(name, "close", error)

        opened, task = self._opened.pop(conversation, {}), asyncio.current_task()
        assert task is not None
        self._ending.add(task)  # whoever closes all waits for it too
        task.add_done_callback(self._ending.discard)
        asked = [name for name, tool in self.tools.items() if _overrides(tool, "close")]
        await asyncio.gather(*(one(name, opened.get(name)) for name in asked))
        for host in self._hosts.values():
            host.forget(conversation)

    async def _close_all(self) -> None:
        closing = {asyncio.create_task(self._close(conversation)) for conversation in list(self._opened)}
        if closing := closing | self._ending:
            await asyncio.wait(closing, timeout=_CLOSING_S)


def _overrides(tool: Tool, method: str) -> bool:
    return getattr(type(tool), method) is not getattr(Tool, method)
