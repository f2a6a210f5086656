"""Runs tool calls beside the rollout: `answer` returns at once, with a future.

Everything that waits for a tool does so in one event loop, which runs no code of tools: each tool has a loop of its own
(`Lane`). So whatever a tool does, every call has its answer soon after its deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from posttrain.conversations.settings import SIDES
from posttrain.conversations.tools.answers import failure, presented, redacted, words_of
from posttrain.conversations.tools.arguments import Misfit, fit
from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolCall, ToolFault
from posttrain.conversations.tools.counts import UNKNOWN, Counts
from posttrain.conversations.tools.lane import Lane

_CLOSING_S = 5.0
"""Seconds that conversations which are still open may take to be closed, all together, when the runner ends."""


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
        self._lanes = {name: Lane(f"tool {name}") for name in tools}
        self._places = {name: asyncio.Semaphore(tool.at_once) for name, tool in tools.items()}
        self._own = Lane("tools")

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
        for lane in (self._own, *self._lanes.values()):
            lane.stop()
        self._shut_down()

    def _shut_down(self) -> None:
        """All tools side by side; one that raises is counted, one that hangs is left to itself."""

        def one(name: str, tool: Tool) -> None:
            try:
                tool.shutdown()
            except BaseException as error:
                self._count(name, "shutdown", error)

        ending = [threading.Thread(target=one, args=pair, daemon=True) for pair in self.tools.items()]
        for thread in ending:
            thread.start()
        end = time.monotonic() + _CLOSING_S
        for thread in ending:
            thread.join(max(0.0, end - time.monotonic()))

    def _count(self, name: str, kind: str, error: BaseException) -> None:
        """An error of a conversation or of the end, which has no answer to be told in."""
        try:
            words = redacted(words_of(error), self.tools[name].secrets)
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
            answer = failure("raised", f"The tool {call.name} is broken.", words_of(error))
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
            arguments = fit(tool.name, tool.schema["function"].get("parameters") or {}, call.arguments)
        except Misfit as error:
            return failure("arguments", str(error))
        problem = await self._problem_of_opening(conversation, call.name)
        if problem:
            return failure("open", f"The tool {call.name} is not available in this conversation.", problem)
        async with self._places[call.name]:
            start = time.perf_counter()
            try:
                said = await self._within(call.name, lambda: tool.call(conversation, arguments))
            except TimeoutError:
                text = f"The tool {call.name} gave no answer within {self._timeout_s:g} seconds."
                return failure("timeout", text, seconds=time.perf_counter() - start)
            except ToolFault as error:
                return failure("said", str(error), seconds=time.perf_counter() - start)
            except Exception as error:
                words = words_of(error)
                text = f"The tool {call.name} failed: {words.rstrip('.')}."
                return failure("raised", text, words, seconds=time.perf_counter() - start)
            return _read(call.name, said, time.perf_counter() - start)

    async def _within(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """What a tool's coroutine gives, run in its lane; TimeoutError at the deadline, which the lane cannot delay.

        Work that never began, because other work blocked the lane, is begun once more in the fresh one."""
        for _ in range(2):
            began = threading.Event()
            future = asyncio.wrap_future(self._lanes[name].start(_guarded(work, began)))
            done, _ = await asyncio.wait([future], timeout=self._timeout_s)
            if done:
                kind, value = future.result()
                if kind == "raised":
                    raise value
                return value
            future.cancel()
            await self._lanes[name].renew_if_stuck()
            if began.is_set():
                break
        raise TimeoutError

    async def _open(self, conversation: Hashable, given: dict[str, dict[str, Any]]) -> None:
        asked = [name for name, tool in self.tools.items() if _overrides(tool, "open")]
        self._opened[conversation] = {
            name: asyncio.create_task(self._open_one(name, conversation, given[name])) for name in asked
        }

    async def _open_one(self, name: str, conversation: Hashable, given: dict[str, Any]) -> str | None:
        """Why the tool could not be opened; None if it could."""
        try:
            await self._within(name, lambda: self.tools[name].open(conversation, **given))
        except TimeoutError:
            return f"`open` gave no answer within {self._timeout_s:g} s"
        except Exception as error:
            return words_of(error)
        return None

    async def _problem_of_opening(self, conversation: Hashable, name: str) -> str | None:
        task = self._opened.get(conversation, {}).get(name)
        return None if task is None else await task

    async def _reward(self, conversation: Hashable, names: list[str]) -> float:
        async def one(name: str) -> float:
            if await self._problem_of_opening(conversation, name):
                return 0.0
            try:
                return float(await self._within(name, lambda: self.tools[name].reward(conversation)))
            except Exception as error:
                self._count(name, "reward", error)
                return 0.0

        return sum(await asyncio.gather(*(one(name) for name in names)))

    async def _close(self, conversation: Hashable) -> None:
        async def one(name: str, opening: asyncio.Task[str | None] | None) -> None:
            if opening is not None and await opening is not None:
                return
            try:
                await self._within(name, lambda: self.tools[name].close(conversation))
            except Exception as error:
                self._count(name, "close", error)

        opened, task = self._opened.pop(conversation, {}), asyncio.current_task()
        assert task is not None
        self._ending.add(task)  # whoever closes all waits for it too
        task.add_done_callback(self._ending.discard)
        asked = [name for name, tool in self.tools.items() if _overrides(tool, "close")]
        await asyncio.gather(*(one(name, opened.get(name)) for name in asked))

    async def _close_all(self) -> None:
        closing = {asyncio.create_task(self._close(conversation)) for conversation in list(self._opened)}
        if closing := closing | self._ending:
            await asyncio.wait(closing, timeout=_CLOSING_S)


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
    except TimeoutError as error:
        return "raised", RuntimeError(str(error) or "it waited too long for something")
    except Exception as error:
        return "raised", error
    except BaseException as error:  # exit() in a tool ends its call, not the run
        return "raised", RuntimeError(f"it raised {type(error).__name__}")


def _read(name: str, said: Any, seconds: float) -> ToolAnswer:
    if isinstance(said, ToolAnswer):
        error = said.error if said.error is None or said.error.startswith("said:") else f"said: {said.error}"
        return ToolAnswer(str(said.text), error, float(said.reward), dict(said.metrics), said.seconds or seconds)
    if isinstance(said, str):
        return ToolAnswer(said, seconds=seconds)
    words = f"it gave a {type(said).__name__}, no text"
    return failure("raised", f"The tool {name} failed: {words}.", words, seconds=seconds)


def _overrides(tool: Tool, method: str) -> bool:
    return getattr(type(tool), method) is not getattr(Tool, method)
