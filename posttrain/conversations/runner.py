"""Runs the agents of all conversations, beside the rollout.

    runner.start(key, ...)       a conversation begins
    runner.give(key, output)     the model's turn, for its agent
    runner.poll(), wait()        what agents did since: turns that they want of the model, conversations that ended

Agents of users run in worker processes (`processes.py`). Whatever one does, its conversation ends: an agent that
raises, or that takes longer than its limit between two turns, has failed. The time of the model or of a tool does not
count, because tools have deadlines of their own.

An agent with `isolated = False` runs in an event loop of the trainer, in a thread of its own. If it blocks that loop it
fails with the others in it, since nothing can interrupt it; later conversations get a fresh loop.

The built-in tool agent awaits nothing but its conversation, so it is `inline`: the caller's thread steps it. It reacts
to a turn at once, and a response without tool calls can go to the rewards while others are still being generated.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from posttrain.conversations.agents import Agent
from posttrain.conversations.chat import (
    Ask,
    Chat,
    ChatFull,
    Ended,
    Event,
    Generate,
    Pause,
    Settle,
    describe_late,
    run_to_end,
)
from posttrain.conversations.conversation import ChatError, Conversation
from posttrain.conversations.processes import AgentProcesses
from posttrain.conversations.tools.base import ToolAnswer, ToolCall
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.conversations.tools.threads import LoopThread
from posttrain.rollout.base import Output

_CHECK_S, _REACT_S = 0.1, 0.5
_QUEUED, _RUNNING, _CALLING, _GENERATING, _ENDED = "queued", "running", "calling", "generating", "ended"
BLOCKED = "another conversation blocks the event loop: an agent awaits what takes time (`await asyncio.to_thread(...)`)"


class Checked(Protocol):
    """What a run cannot continue without."""

    def check(self) -> None:
        """UserError where it is lost."""
        ...


@dataclass(eq=False)
class _Work:
    """One agent at work in an event loop."""

    key: Hashable
    lane: LoopThread
    state: str = _QUEUED
    # `queued`: it was started, or given a turn, and the event loop has not come to it yet. `calling`: it waits for a
    # tool; `generating`: for the model.
    since: float = 0.0
    task: asyncio.Task[Any] | None = None
    turns: dict[int, Settle] = field(default_factory=dict)
    """What takes the turns that it awaits, by the id of what it wants: a program may await several at once."""


class Runner:
    """Runs agents; a context manager. No agent can end or hang it."""

    def __init__(
        self,
        tools: ToolRunner,
        timeout_s: float,
        processes: AgentProcesses | None = None,
        programs: Checked | None = None,
    ) -> None:
        self.tools, self.timeout_s, self.processes = tools, timeout_s, processes
        self._checked = [one for one in (tools, processes, programs) if one is not None]
        # What happened in other threads: events of agents, with their conversation where it is in a worker process, and
        # tool answers for inline ones.
        self._news = queue.SimpleQueue[tuple[Hashable, Event | Future[list[ToolAnswer]], Conversation | None]]()
        if processes is not None:
            processes.connect(tools, lambda *news: self._news.put(news))
        # Conversations in worker processes, and whether their agents are at work.
        self._remote: dict[Hashable, tuple[Chat, bool]] = {}
        self._inline: dict[Hashable, Coroutine[Any, Any, Any]] = {}
        # Tool calls of inline agents that are under way.
        self._calls = 0
        self._work: dict[Hashable, _Work] = {}
        # Guards the states of work, which both the agents' thread and the caller's change.
        self._lock = threading.Lock()
        self._moved = time.monotonic()
        self._closed = False
        self._lane = LoopThread("agents")

    # -- called by the driver -------------------------------------------------------------------------------------
    def ask(self, key: Hashable, *, inline: bool) -> Ask:
        """How the agent of a conversation asks for a turn of the model, or for tool calls."""
        return _yield if inline else lambda wanted: self._ask(key, wanted)

    def start(self, key: Hashable, agent: Agent, chat: Chat, row: dict[str, Any]) -> Event | None:
        """Starts the agent; gives what it wants first, if it is inline."""
        if agent.inline:
            self._inline[key] = agent.lead(chat, row)
            return self._step(key, None)
        if agent.isolated and self.processes is not None:
            self._remote[key] = chat, True
            self.processes.start(key, row, chat.conversation)
            return None
        with self._lock:
            work = self._work[key] = _Work(key, self._lane)
            self._moved = time.monotonic()
        self._lane.start(self._run(work, lambda: agent.lead(chat, row)))
        return None

    def give(self, key: Hashable, wanted: Generate, output: Output | Exception) -> Event | None:
        """The turn that was asked for, or why there is none (of agents in the trainer's event loop alone); gives what
        the agent wants next, if it is inline and does not wait for a tool. An agent that has ended meanwhile does not
        get the turn."""
        if key in self._inline:
            return self._step(key, output)
        if key in self._remote:
            self._remote[key] = self._remote[key][0], True
            self.processes.give(key, output)  # pyright: ignore (there are processes)
            return None
        work = self._work.get(key)
        settle = None if work is None else work.turns.pop(id(wanted), None)
        if work is None or settle is None:
            return None
        if not work.turns:
            with self._lock:
                work.state, self._moved = _QUEUED, time.monotonic()
        settle(output)
        return None

    def request(self, key: Hashable, wanted: Generate, settle: Settle) -> None:
        """Asks for a turn on behalf of a program, from any thread: `settle` is called with it in the driver's, without
        a detour through the agents' event loop."""
        work = self._work.get(key)
        if work is None:
            settle(ChatError("the conversation has ended"))
            return

        def take(output: Output | Exception) -> None:
            if not work.turns:  # the program's time begins when it awaits nothing
                self._set_running(work)
            settle(output)

        work.turns[id(wanted)] = take
        self._report(work, _GENERATING, wanted)

    def is_inline(self, key: Hashable) -> bool:
        return key in self._inline

    @property
    def unread(self) -> int:
        """Events that the next `poll` gives."""
        return self._news.qsize()

    @property
    def is_at_work(self) -> bool:
        """Whether events are unread, or may come before the model gives another turn."""
        with self._lock:
            # Nothing comes from an agent that waits for the model before it is given its turn.
            working = any(work.state in (_QUEUED, _RUNNING, _CALLING) for work in self._work.values())
        working = working or any(is_at_work for _, is_at_work in self._remote.values())
        return working or self._calls > 0 or not self._news.empty()  # read last: what is not at work has reported

    def poll(self) -> dict[Hashable, list[Event]]:
        """What has happened since, by conversation. UserError if no worker processes can be started any more."""
        self._check_deadlines()
        for one in self._checked:
            one.check()
        found = dict[Hashable, list[Event]]()
        while not self._news.empty():
            self._take(found)
        return found

    def wait(self) -> dict[Hashable, list[Event]]:
        """As `poll`, but at least one event if an agent is at work."""
        while not (found := self.poll()):
            if not self.is_at_work:
                break
            with suppress(queue.Empty):
                self._take(found, _CHECK_S)
            if found:
                break
        return found

    def _take(self, found: dict[Hashable, list[Event]], timeout_s: float = 0.0) -> None:
        key, event, conversation = self._news.get(timeout=timeout_s)
        if key in self._remote:
            chat, _ = self._remote.pop(key)
            if conversation is not None:
                chat.adopt(conversation)
            if isinstance(event, Generate):
                self._remote[key] = chat, False
        if isinstance(event, Future):
            self._calls -= 1
            event = self._step(key, event.result())
        if event is not None:
            found.setdefault(key, []).append(event)

    def close(self) -> None:
        """Agents that are still at work are cancelled; those that hang are left alone."""
        if self._closed:
            return
        self._closed = True
        if self.processes is not None:
            self.processes.close()
        self._lane.stop()
        for coroutine in self._inline.values():
            coroutine.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inline agents, in the driver's thread --------------------------------------------------------------------
    def _step(self, key: Hashable, value: Any) -> Event | None:
        """Resumes the coroutine with what it awaited. It yields what it wants (`_yield`), not a future."""
        try:
            wanted = self._inline[key].send(value)
        except (StopIteration, ChatFull) as end:
            del self._inline[key]
            return Ended(getattr(end, "value", None))
        if isinstance(wanted, Generate):
            return wanted
        self._calls += 1
        self.tools.answer(key, wanted).add_done_callback(lambda answers: self._news.put((key, answers, None)))
        return None

    # -- other agents, in the event loop --------------------------------------------------------------------------
    async def _run(self, work: _Work, lead: Callable[[], Awaitable[Any]]) -> None:
        work.task = asyncio.current_task()
        self._set_running(work)
        ended = await run_to_end(lead())
        self._report(work, _ENDED, ended)

    async def _ask(self, key: Hashable, wanted: Generate | list[ToolCall] | Pause) -> Any:
        work = self._work.get(key)
        if work is None:
            raise asyncio.CancelledError  # the conversation was given up, and its agent continues nevertheless
        try:
            if isinstance(wanted, Generate):
                turn = asyncio.get_running_loop().create_future()
                work.turns[id(wanted)] = lambda output: _call_in(work.lane, lambda: _settle(turn, output))
                self._report(work, _GENERATING, wanted)
                return await turn
            self._report(work, _CALLING)
            if isinstance(wanted, Pause):
                return await wanted.until
            return await asyncio.wrap_future(self.tools.answer(key, wanted))
        finally:
            if not work.turns:  # its time begins when it awaits nothing
                self._set_running(work)

    def _set_running(self, work: _Work) -> None:
        self._report(work, _RUNNING)
        work.since = time.monotonic()

    def _report(self, work: _Work, state: str, event: Event | None = None) -> None:
        with self._lock:
            if work.state == _ENDED:
                return  # given up meanwhile
            work.state, self._moved = state, time.monotonic()
            if state == _ENDED:
                del self._work[work.key]
            if event is not None:  # under the lock: the agent is not idle before its event is there
                self._news.put((work.key, event, None))

    # -- deadlines ------------------------------------------------------------------------------------------------
    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            works = list(self._work.values())
            late = [work for work in works if work.state == _RUNNING and now - work.since > self.timeout_s]
            queued = [work for work in works if work.state == _QUEUED]
            # Nobody is late, yet the loop has not come to those in the queue for so long: something outside of any
            # agent's own time, such as a callback, blocks it.
            stuck = bool(queued) and not late and now - self._moved > self.timeout_s
        for work in late:
            self._report(work, _ENDED, Ended(error=describe_late(self.timeout_s)))
            if work.task is not None:
                _call_in(work.lane, work.task.cancel)
        for lane in {work.lane for work in late}:
            if _is_blocked_by([work for work in late if work.lane is lane]):
                self._give_up(lane)
        if stuck:
            for lane in {work.lane for work in queued}:
                self._give_up(lane)

    def _give_up(self, lane: LoopThread) -> None:
        """Abandons an event loop that is blocked, with the conversations in it."""
        if lane is self._lane:
            self._lane = LoopThread("agents")
        with self._lock:
            lost = [work for work in self._work.values() if work.lane is lane]
        for work in lost:
            self._report(work, _ENDED, Ended(error=BLOCKED))
        _call_in(lane, lane.loop.stop)


def _settle(future: asyncio.Future[Output], output: Output | Exception) -> None:
    if future.done():  # it was cancelled
        return
    if isinstance(output, Exception):
        future.set_exception(output)
    else:
        future.set_result(output)


@types.coroutine
def _yield(wanted: Generate | list[ToolCall] | Pause) -> Generator[Any, Any, Any]:
    """Awaits in an inline agent: yields to the driver, and returns what it is resumed with."""
    return (yield wanted)


def _call_in(lane: LoopThread, what: Callable[[], Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed
        lane.loop.call_soon_threadsafe(what)


def _is_blocked_by(late: list[_Work]) -> bool:
    """Whether one of these holds their event loop, so that nothing else in it can run."""
    lane, reacts = late[0].lane, threading.Event()
    _call_in(lane, reacts.set)
    if reacts.wait(_REACT_S):
        return False
    current = asyncio.current_task(lane.loop)
    return any(work.task is current for work in late)
