"""The worker processes of agents and environments: one that blocks, hangs, crashes or exits costs its own conversation.

A process leads several conversations, so that thousands of light agents do not need thousands of processes. When it is
lost, the conversation that was running (`tools/marks.py`) has failed. The others begin anew in another process, where
they are given the turns and tool answers that they had before: an agent that repeats its steps does not notice. If
several were running at that moment, in threads, each of them begins anew in a process of its own, where it is known
which one fails. If a machine is lost, all conversations in its processes begin anew on the others.

Everything here runs in one event loop in a thread of its own, which never waits for a process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain import cores
from posttrain.conversations.agent_worker import serve_agents
from posttrain.conversations.agents import Agents
from posttrain.conversations.chat import Ended, Event, Generate, Setup, describe_late
from posttrain.conversations.conversation import Conversation
from posttrain.conversations.tools.base import ToolCall, describe_error
from posttrain.conversations.tools.forks import ForkServer
from posttrain.conversations.tools.marks import place_of
from posttrain.conversations.tools.runner import ToolRunner
from posttrain.conversations.tools.threads import LoopThread
from posttrain.machines.channel import pack
from posttrain.machines.cluster import Machine, Places

AGENTS_KIND = "agents"
"""The kind of worker processes that a machine is prepared for."""
Report = Callable[[Hashable, Event, Conversation | None], None]
"""Called with what an agent did, and its conversation as its process has it."""

# A process ends a conversation that is late itself; one that says nothing for so much longer is blocked.
_GRACE_S, _CHECK_S, _CLOSING_S = 0.5, 0.1, 10.0
_START_S = 60.0  # for a process to begin: on a busy machine a fork takes its time
_MOST_RESTARTS = 20
DIVERGED = (
    "it began anew, because another conversation ended their process, and did not repeat its steps: draw random "
    "numbers from random.Random(chat.seed), or set `isolated = False` on the agent"
)


@dataclass(eq=False)
class _Asked:
    """Something that an agent asked for; a restarted agent must ask for the same, and is given the same answer."""

    is_turn: bool
    print: int
    answer: Any = None  # None: not known yet
    request: int | None = None  # its number in the process; None: not asked for since the restart


@dataclass(eq=False)
class _Play:
    """One conversation."""

    key: Hashable
    number: int
    start: bytes  # the message that begins it
    process: _Process | None = None
    asked: list[_Asked] = field(default_factory=list)
    answered: list[_Asked] = field(default_factory=list)  # in the order in which answers came: so they are repeated
    given: int = 0  # how many of these its process has been given
    waiting: int = 0  # how many requests of its process have no answer yet
    restarts: int = 0

    @property
    def computing(self) -> bool:
        """Whether neither the model nor a tool is at work for it."""
        return not self.waiting

    def find(self, is_turn: bool, print: int) -> _Asked | None:
        """The same request before a restart. Turns come in order; branches may call tools side by side."""
        left = [one for one in self.asked if one.request is None and one.is_turn == is_turn]
        if is_turn and left and left[0].print != print:
            raise ValueError(DIVERGED)
        return next((one for one in left if one.print == print), None)


class _Process:
    """One worker with its conversations."""

    def __init__(self, worker: Any, *, alone: bool) -> None:
        self.worker, self.alone = worker, alone
        self.plays: dict[int, _Play] = {}
        self.late = list[int]()  # conversations that were given up, whose code may still run in it
        self.outbox = bytearray()
        self.ready = False  # whether it has begun
        self.since = time.monotonic()  # its last message, or when it was given work after it had none
        self.why = ""  # why it is being ended on its machine

    @property
    def is_open(self) -> bool:
        """Whether it takes further conversations."""
        return not (self.why or self.late or (self.alone and self.plays))

    def is_blocked(self, limit_s: float) -> bool:
        limit_s = limit_s if self.ready else max(limit_s, _START_S)
        return self._is_computing() and time.monotonic() - self.since > limit_s

    def _is_computing(self) -> bool:
        return any(play.computing for play in self.plays.values())

    def expect_work(self) -> None:
        """The process is given something to do. If that was all it has, its time begins now."""
        if sum(play.computing for play in self.plays.values()) <= 1:
            self.since = time.monotonic()


class AgentProcesses:
    """Leads conversations in at most `most` processes on each machine, as long as none is lost. Make it before threads
    are started: the parent of the processes is forked here. `connect` begins the work."""

    def __init__(self, agents: Agents, setup: Setup, *, timeout_s: float, most: int) -> None:
        self._timeout_s, self._most = timeout_s, most
        with contextlib.suppress(Exception):  # the template is compiled here, not in each process
            setup.template.prompt([{"role": "user", "content": "?"}])
        self._server = ForkServer(serve_agents(agents, setup, timeout_s), agents.import_modules)
        self._places = Places(self._server.start, 1)
        self._processes: list[_Process] = []
        self._plays: dict[Hashable, _Play] = {}
        self._started = 0

    def connect(self, tools: ToolRunner, report: Report) -> None:
        """`tools` answers tool calls of agents; `report` is called in another thread, with what they want."""
        self._tools, self._report, self._lane = tools, report, LoopThread("agent processes")
        self._lane.loop.call_soon_threadsafe(self._check_processes)

    def spread(self, machines: Sequence[Machine]) -> None:
        """Start processes on these machines as well, in proportion to their cores. They were prepared for the kind
        `agents`."""
        others = [(one, one.cores) for one in machines]
        self._places = Places(self._server.start, cores.usable(), AGENTS_KIND, others, most=self._most)

    @property
    def most(self) -> int:
        """Of processes, on all machines."""
        return self._most * self._places.machines

    # -- called by the runner -------------------------------------------------------------------------------------
    def start(self, key: Hashable, row: Mapping[str, Any], conversation: Conversation) -> None:
        self._started += 1
        try:
            message = pack(("start", self._started, row, conversation))
        except Exception as error:
            words = f"its row cannot be sent to a worker process ({describe_error(error)}); `isolated = False` on the "
            self._report(key, Ended(error=f"{words}agent runs it in the trainer"), None)
            return
        self._call(self._begin, _Play(key, self._started, message))

    def give(self, key: Hashable, answer: Any) -> None:
        self._call(self._answer_turn, key, answer)

    def check(self) -> None:
        """UserError where no processes can be started any more: all conversations would fail."""
        self._server.check("agents")

    def close(self) -> None:
        """Ends all processes, whatever they do."""

        async def end() -> None:
            for process in list(self._processes):
                self._end(process)

        with contextlib.suppress(TimeoutError):
            self._lane.start(end()).result(_CLOSING_S)
        self._lane.stop()
        self._server.close()

    def _call(self, what: Callable[..., None], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # closed
            self._lane.loop.call_soon_threadsafe(what, *given)

    # -- conversations, in the event loop -------------------------------------------------------------------------
    def _begin(self, play: _Play, *, alone: bool = False) -> None:
        self._plays[play.key] = play
        try:
            process = play.process = self._choose(alone)
        except RuntimeError as error:  # the machine is out of processes, or of memory
            self._finish(play, Ended(error=describe_error(error)))
            return
        process.plays[play.number], play.waiting, play.given = play, 0, 0
        process.expect_work()
        for one in play.asked:
            one.request = None
        self._send(process, play.start)

    def _choose(self, alone: bool) -> _Process:
        open_ones = [] if alone else [one for one in self._processes if one.is_open]
        chosen = min(open_ones, key=lambda one: len(one.plays), default=None)
        if chosen is None or (chosen.plays and len(open_ones) < self.most):
            chosen = _Process(self._places.start(one.worker for one in self._processes), alone=alone)
            self._processes.append(chosen)
            self._lane.loop.add_reader(chosen.worker.channel.fileno(), self._read, chosen)
        return chosen

    def _ask(
        self, play: _Play, request: int, wanted: Generate | list[ToolCall], conversation: Conversation | None
    ) -> None:
        """What an agent wants next; one that was restarted repeats what it wanted before."""
        is_turn, seen = isinstance(wanted, Generate), _fingerprint(wanted)
        try:
            asked = play.find(is_turn, seen)
        except ValueError as error:
            self._fail(play, str(error))
            return
        if asked is not None:
            asked.request = request
            if asked.answer is None:
                play.waiting += 1
            self._give(play)
            return
        play.waiting += 1
        asked = _Asked(is_turn, seen, request=request)
        play.asked.append(asked)
        if isinstance(wanted, Generate):
            self._report(play.key, wanted, conversation)
        else:
            answers = self._tools.answer(play.key, wanted)
            answers.add_done_callback(lambda done: self._call(self._answer, play, asked, done.result()))

    def _answer_turn(self, key: Hashable, output: Any) -> None:
        if play := self._plays.get(key):  # otherwise it has ended meanwhile
            self._answer(play, next(one for one in reversed(play.asked) if one.is_turn), output)

    def _answer(self, play: _Play, asked: _Asked, answer: Any) -> None:
        asked.answer = answer
        play.answered.append(asked)
        play.waiting -= asked.request is not None  # otherwise it was restarted, and has not come so far again
        self._give(play)

    def _give(self, play: _Play) -> None:
        """Gives a process all answers that it has asked for, in their order."""
        process = play.process
        if process is None or play.number not in process.plays:
            return
        process.expect_work()
        while play.given < len(play.answered) and (one := play.answered[play.given]).request is not None:
            play.given += 1
            self._send(process, pack(("give", play.number, one.request, one.answer)))

    def _fail(self, play: _Play, error: str) -> None:
        process = play.process
        if process is not None and play.number in process.plays:
            process.late.append(play.number)  # its code may go on
            self._send(process, pack(("stop", play.number)))
        self._finish(play, Ended(error=error))

    def _finish(self, play: _Play, ended: Ended, conversation: Conversation | None = None) -> None:
        self._plays.pop(play.key, None)
        self._report(play.key, ended, conversation)
        process = play.process
        if process is None:
            return
        process.plays.pop(play.number, None)
        if process in self._processes and not process.plays:
            if process.late or len(self._processes) > self.most:
                self._end(process)
            process.alone = False

    # -- processes ------------------------------------------------------------------------------------------------
    def _read(self, process: _Process) -> None:
        channel = process.worker.channel
        for kind, *rest in channel.receive():
            process.since = time.monotonic()
            if kind == "ready":
                process.ready = True
            elif kind == "print":
                print(rest[0])
            elif play := process.plays.get(rest[0]):
                if kind == "ask":
                    self._ask(play, *rest[1:])
                else:
                    ended, conversation, late = rest[1:]
                    if late:
                        process.late.append(play.number)
                    self._finish(play, ended, conversation)
        if process in self._processes and (channel.ended or channel.broken):
            self._lose(process)

    def _send(self, process: _Process, message: bytes) -> None:
        process.outbox += message
        self._write(process)

    def _write(self, process: _Process) -> None:
        """Writes what there is room for: a process that is blocked does not read, and must not block this loop."""
        descriptor = process.worker.channel.fileno()
        try:
            while process.outbox:
                del process.outbox[: os.write(descriptor, process.outbox)]
        except BlockingIOError:
            self._lane.loop.add_writer(descriptor, self._write, process)
            return
        except OSError:  # it has ended, which `_read` finds
            process.outbox.clear()
        self._lane.loop.remove_writer(descriptor)

    def _check_processes(self) -> None:
        for process in list(self._processes):
            if process.is_blocked(self._timeout_s + _GRACE_S):
                self._read(process)  # this loop may have been busy itself, and not have come to its messages
            if process in self._processes and process.is_blocked(self._timeout_s + _GRACE_S) and not process.why:
                process.why = describe_late(self._timeout_s)
                if process.worker.stop():  # otherwise its channel ends when its machine has ended it
                    self._lose(process)
        self._lane.loop.call_later(_CHECK_S, self._check_processes)

    def _lose(self, process: _Process) -> None:
        """A process has ended or was blocked: one conversation fails, the others begin anew."""
        end, why = process.worker.ended(), process.why
        self._end(process)
        running, strays = list[_Play](), end.running is None
        if end.running is not None:
            running = [play for play in process.plays.values() if place_of(play.number) in end.running]
            strays = any(place_of(number) in end.running for number in process.late)
            if not running and not strays:  # it was in no step of a conversation: a callback, or a thread of an agent
                running = [play for play in process.plays.values() if play.computing]
        guilty = running if len(running) == 1 and not strays else []
        for play in list(process.plays.values()):
            play.restarts += 1
            if play in guilty:
                self._finish(play, Ended(error=why or f"its process ended ({end.text})"))
            elif play.restarts > _MOST_RESTARTS:
                self._finish(play, Ended(error=f"its process was lost {play.restarts} times (the last: {end.text})"))
            else:
                self._begin(play, alone=play in running)

    def _end(self, process: _Process) -> None:
        self._processes.remove(process)
        descriptor = process.worker.channel.fileno()
        self._lane.loop.remove_reader(descriptor)
        self._lane.loop.remove_writer(descriptor)
        process.worker.kill()


def _fingerprint(wanted: Generate | list[ToolCall]) -> int:
    if isinstance(wanted, Generate):
        return hash((tuple(wanted.prompt_ids), wanted.max_tokens, wanted.stop, wanted.kept))
    return hash(repr([(call.name, call.arguments) for call in wanted]))
