"""Agents at work, beside the rollout: all of them in one event loop, in a thread of its own.

    runner.start(key, lead)      a conversation begins
    runner.poll(), wait()        what has happened since: turns that are wanted of the model, conversations that ended
    runner.give(key, output)     the model's turn

Whatever an agent does, its conversation ends: one that raises, or that takes longer than its limit between two turns,
has failed. The time that the model takes does not count. An agent that blocks the event loop for so long takes the
conversations of that loop with it; others go on in a fresh one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.rollout.agents.chat import Ask, ChatFull
from posttrain.rollout.base import Output
from posttrain.rollout.tools.answers import words_of
from posttrain.rollout.tools.lane import Lane
from posttrain.texts import well_formed

_LOOKS_S, _REACTS_S = 0.1, 0.5
_GIVEN, _THINKS, _ASKS, _ENDED = "given", "thinks", "asks", "ended"


@dataclass(frozen=True)
class Ended:
    """How a conversation ended: what the agent returned, or why it failed."""

    value: Any = None
    error: str | None = None


Event = Ask | Ended


@dataclass(eq=False)
class _Work:
    """One agent under way."""

    key: Hashable
    lane: Lane
    state: str = _GIVEN
    """`given`: begun, or given a turn, and not at work with it yet."""
    since: float = 0.0
    task: asyncio.Task[Any] | None = None
    turn: asyncio.Future[Output] | None = None


class AgentRunner:
    """Runs the agents of all conversations; a context manager. No agent can end or hang it."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._work: dict[Hashable, _Work] = {}
        self._events: dict[Hashable, Event] = {}
        self._moved = time.monotonic()
        self._lane = Lane("agents")

    # -- called by the driver -------------------------------------------------------------------------------------
    def start(self, key: Hashable, lead: Callable[[], Awaitable[Any]]) -> None:
        """A conversation, led by the coroutine that `lead` gives."""
        with self._changed:
            work = self._work[key] = _Work(key, self._lane)
            self._moved = time.monotonic()
        self._lane.start(self._lead(work, lead))

    def give(self, key: Hashable, output: Output) -> None:
        """The turn that was asked for. An agent that has ended meanwhile does not hear of it."""
        work = self._work.get(key)
        if work is None or work.turn is None:
            return
        with self._changed:
            work.state, self._moved = _GIVEN, time.monotonic()
        future, work.turn = work.turn, None
        self._in(work.lane, lambda: future.done() or future.set_result(output))

    def poll(self) -> dict[Hashable, Event]:
        """What has happened since, by conversation."""
        self._look_at_the_clock()
        with self._changed:
            found, self._events = self._events, {}
        return found

    def wait(self) -> dict[Hashable, Event]:
        """As `poll`, but at least one event if an agent is at work."""
        while not (found := self.poll()):
            with self._changed:
                if not any(work.state in (_GIVEN, _THINKS) for work in self._work.values()) and not self._events:
                    return {}
                self._changed.wait_for(lambda: bool(self._events), _LOOKS_S)
        return found

    def ask_of(self, key: Hashable) -> Callable[[Ask], Awaitable[Output]]:
        """How the agent of a conversation asks for a turn."""

        async def ask(wanted: Ask) -> Output:
            work = self._work.get(key)
            if work is None or work.state == _ENDED:
                raise asyncio.CancelledError  # it was given up, and goes on nevertheless
            work.turn = asyncio.get_running_loop().create_future()
            turn = work.turn
            self._happened(work, _ASKS, wanted)
            try:
                return await turn
            finally:
                self._thinks(work)

        return ask

    def close(self) -> None:
        """Whoever is still at work is cancelled, and what hangs is left to itself."""
        self._lane.stop()

    def __enter__(self) -> AgentRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the event loop ----------------------------------------------------------------------------------------
    async def _lead(self, work: _Work, lead: Callable[[], Awaitable[Any]]) -> None:
        work.task = asyncio.current_task()
        self._thinks(work)
        try:
            ended = Ended(await lead())
        except ChatFull:
            ended = Ended()
        except asyncio.CancelledError:
            ended = Ended(error="it was cancelled")
        except Exception as error:
            ended = Ended(error=well_formed(f"{words_of(error)}{_place(error)}"))
        except BaseException as error:  # exit() in an agent ends its conversation, not the run
            ended = Ended(error=f"it raised {type(error).__name__}")
        self._happened(work, _ENDED, ended)

    def _thinks(self, work: _Work) -> None:
        with self._changed:
            if work.state != _ENDED:
                work.state, work.since = _THINKS, time.monotonic()
                self._moved = work.since

    def _happened(self, work: _Work, state: str, event: Event) -> None:
        with self._changed:
            if work.state == _ENDED:
                return  # given up meanwhile
            work.state, self._moved = state, time.monotonic()
            self._events[work.key] = event
            if state == _ENDED:
                del self._work[work.key]
            self._changed.notify_all()

    # -- limits ---------------------------------------------------------------------------------------------------
    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [work for work in self._work.values() if work.state == _THINKS and now - work.since > self.timeout_s]
            given = [work for work in self._work.values() if work.state == _GIVEN]
            stuck = bool(given) and not late and now - self._moved > self.timeout_s
        for work in late:
            self._fail(work, f"it took longer than {self.timeout_s:g} seconds between two turns (agent.timeout_s)")
        for lane in {work.lane for work in late}:
            if self._blocks([work for work in late if work.lane is lane]):
                self._give_up(lane)
        if stuck:
            for lane in {work.lane for work in given}:
                self._give_up(lane)

    def _fail(self, work: _Work, words: str) -> None:
        self._happened(work, _ENDED, Ended(error=words))
        if work.task is not None:
            self._in(work.lane, work.task.cancel)

    def _blocks(self, late: list[_Work]) -> bool:
        """Whether one of these holds the event loop, so that nobody else in it comes to anything."""
        lane, reacts = late[0].lane, threading.Event()
        self._in(lane, reacts.set)
        if reacts.wait(_REACTS_S):
            return False
        current = asyncio.current_task(lane.loop)
        return any(work.task is current for work in late)

    def _give_up(self, lane: Lane) -> None:
        """Nothing happens in this loop any more."""
        if lane is self._lane:
            self._lane = Lane("agents")
        with self._changed:
            lost = [work for work in self._work.values() if work.lane is lane]
        for work in lost:
            self._happened(work, _ENDED, Ended(error=BLOCKED))
        self._in(lane, lane.loop.stop)

    @staticmethod
    def _in(lane: Lane, what: Callable[[], Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            lane.loop.call_soon_threadsafe(what)


_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(asyncio.__file__).parent.parent))
BLOCKED = "another conversation blocks the event loop: an agent awaits what takes time (`await asyncio.to_thread(...)`)"


def _place(error: BaseException) -> str:
    """Where an error was raised, by file and line: the last place that is not in a library."""
    found, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and "site-packages" not in file:
            found = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found
