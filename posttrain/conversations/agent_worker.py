"""A worker process of agents: it was forked with the run's agents in it, and leads several conversations at a time.

    from the trainer   ("start", number, row, conversation), ("give", number, request, turn or tool answers),
                       ("stop", number)
    to the trainer     ("ask", number, request, what the agent wants, conversation),
                       ("ended", number, Ended, conversation, late), ("ready",), ("print", line)

This process appends observations and sampled turns to the conversation as they come, and the trainer takes it over with
the next turn that the agent asks for. Chat templates are rendered here, beside the trainer.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from posttrain.conversations.agents import Agents
from posttrain.conversations.chat import Chat, Ended, Generate, Pause, Setup, describe_late, run_to_end
from posttrain.conversations.conversation import Conversation
from posttrain.conversations.tools.base import ToolCall, describe_error
from posttrain.conversations.tools.forks import Serve
from posttrain.conversations.tools.marks import CURRENT, MarkedSteps, Marks
from posttrain.conversations.tools.worker import MOST_LINES, enter_worker
from posttrain.machines.channel import Channel


def serve_agents(agents: Agents, setup: Setup, timeout_s: float) -> Serve:
    """What a worker process of these agents does."""
    return lambda channel, marks: AgentWorker(channel, agents, setup, marks, timeout_s).serve()


class AgentWorker:
    """Leads conversations until the trainer closes the channel."""

    def __init__(self, channel: Channel, agents: Agents, setup: Setup, marks: Marks, timeout_s: float) -> None:
        self.channel, self.agents, self.setup, self.marks, self.timeout_s = channel, agents, setup, marks, timeout_s
        self.plays: dict[int, _Play] = {}
        self._process = os.getpid()

    def serve(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a forked process
        self._lines, self.loop = enter_worker(self.channel), asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(lambda _loop, _context: None)  # errors of an agent's own tasks are its business
        self.loop.set_task_factory(_make_task)
        self.loop.add_reader(self.channel.fileno(), self._read)
        self.channel.send(("ready",))
        self.loop.run_forever()

    def _read(self) -> None:
        for kind, number, *given in self.channel.receive():
            self._lines.left = MOST_LINES
            if kind == "start":
                self.plays[number] = play = _Play(self, number)
                play.begin(*given)
            elif play := self.plays.get(number):
                play.give(*given) if kind == "give" else play.stop()
        if self.channel.ended:
            self.loop.stop()

    def send(self, message: tuple[Any, ...]) -> None:
        if os.getpid() != self._process:  # the agent forked, and this is its child, which came back too
            os._exit(0)
        self._lines.flush_line()
        self.channel.send(message)


class _Play:
    """One conversation in this process."""

    def __init__(self, worker: AgentWorker, number: int) -> None:
        self.worker, self.number, self.mark = worker, number, worker.marks.of(number)
        self._asked: dict[int, asyncio.Future[Any]] = {}  # by request; branches may ask side by side
        self._requests = 0
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    def begin(self, row: dict[str, Any], conversation: Conversation) -> None:
        self._conversation = conversation
        chat = Chat(conversation, row.get("raw_prompt") or (), self.worker.setup, self._ask)
        token = CURRENT.set(self.mark)  # tasks and threads that the agent starts inherit it
        self._task = self.worker.loop.create_task(self._lead(chat, row))
        CURRENT.reset(token)
        self._start_clock()

    async def _lead(self, chat: Chat, row: dict[str, Any]) -> None:
        async def lead() -> Any:
            return await self.worker.agents(row).lead(chat, row)

        self._end(await run_to_end(lead()))

    async def _ask(self, wanted: Generate | list[ToolCall] | Pause) -> Any:
        if self.number not in self.worker.plays:
            raise asyncio.CancelledError  # the conversation was given up, and its agent continues nevertheless
        self._stop_clock()
        if isinstance(wanted, Pause):
            try:
                return await wanted.until
            finally:
                self._start_clock()
        request, self._requests = self._requests, self._requests + 1
        answered = self._asked[request] = self.worker.loop.create_future()
        try:
            if not isinstance(wanted, Generate):
                self._send("ask", request, wanted, None)  # what a tool answers is recorded here
                return await answered
            # Both sides count the request and record the turn, so that neither has to send it back.
            branch = self._conversation.branches[wanted.branch or 0]
            self._send("ask", request, wanted, self._conversation)
            self._conversation.begin_request(branch)
            output = await answered
            self._conversation.end_request(branch, wanted.prompt_ids, output, kept=wanted.kept)
            return output
        finally:
            del self._asked[request]
            if not self._asked:
                self._start_clock()

    def give(self, request: int, answer: Any) -> None:
        if (asked := self._asked.get(request)) and not asked.done():
            asked.set_result(answer)

    def stop(self) -> None:
        self._stop_clock()
        self.worker.plays.pop(self.number, None)
        self._task.cancel()

    def _end(self, ended: Ended, *, late: bool = False) -> None:
        self._stop_clock()
        if self.worker.plays.pop(self.number, None) is not None:
            self._send("ended", ended, self._conversation, late)

    def _send(self, kind: str, *what: Any) -> None:
        try:
            self.worker.send((kind, self.number, *what))
        except OSError:
            raise
        except Exception as error:  # what cannot be pickled
            self.worker.plays.pop(self.number, None)
            words = f"what it gave cannot be sent to the trainer: {describe_error(error)}"
            self.worker.send(("ended", self.number, Ended(error=words), None, False))

    # A coroutine that waits too long is ended here. One that blocks the loop is seen by the trainer, which ends the
    # whole process.
    def _start_clock(self) -> None:
        self._stop_clock()
        self._since = self._read_clock()
        self._timer = self.worker.loop.call_later(self.worker.timeout_s, self._check_clock)

    def _read_clock(self) -> float:
        return time.monotonic() - self.mark.seconds_of_others  # it is not to blame for what they blocked

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_clock(self) -> None:
        if (left := self._since + self.worker.timeout_s - self._read_clock()) > 0:
            self._timer = self.worker.loop.call_later(left, self._check_clock)
            return
        self._end(Ended(error=describe_late(self.worker.timeout_s)), late=True)
        self._task.cancel()


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
    mark = CURRENT.get()
    return asyncio.Task(coroutine if mark is None else MarkedSteps(coroutine, mark), loop=loop, **more)
