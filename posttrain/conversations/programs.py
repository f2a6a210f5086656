"""Programs as agents: each sample has a base URL, behind which a program of the user's speaks to the policy.

The trainer starts the program for every sample (`agent.program="python agent.py"`), with the address in the variables
that the `openai` and `anthropic` clients read. Or a program asks for samples itself: one that is started once
(`agent.program_per=run`), or programs that run elsewhere (`agent.program=outside`). A program is one more agent of the
conversation loop: `lead` ends when the program has, and its requests become turns of the conversation. What a program
does wrong costs its own samples.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.conversations.chat import Chat
from posttrain.conversations.conversation import TooManyRows
from posttrain.conversations.program_process import (
    KEY_VARIABLE,
    Program,
    ProgramFailed,
    Slots,
    addresses,
    describe_status,
    find_command,
    parse_reward,
    read_reward,
)
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.serving.process import ServerProcess, listen, url_of
from posttrain.conversations.serving.remote import TurnPoster, described
from posttrain.conversations.serving.requests import ApiError, ContextFull
from posttrain.conversations.serving.sessions import Sessions
from posttrain.conversations.serving.wire import Link
from posttrain.conversations.settings import AGENT_KEY as KEY
from posttrain.conversations.settings import EXTERNAL_PROGRAM, AgentSettings
from posttrain.conversations.tools.threads import LoopThread
from posttrain.errors import UserError
from posttrain.rollout.base import Output

_START_S = 30.0
QUIET_S = 60.0  # after which the user is told that no program asks for samples
_LOOK_S = 0.05  # between two looks at whether the program of the run is to be started or ended
_LONGEST_ERROR = 2000  # characters
_LONGEST_VARIABLE = 100_000  # bytes; Linux starts no program with a longer one


@dataclass(eq=False)
class Front:
    """An HTTP process of the run: it has some of the sessions, whose addresses begin with its URL."""

    process: ServerProcess
    url: str
    link: Link | None = None
    """None once it has ended and cannot be started again."""
    sessions: int = 0


@dataclass(eq=False)
class Session:
    """One sample: its conversation, and what its program has posted. Its ledger is in the HTTP process."""

    id: str
    key: str
    chat: Chat
    task: dict[str, Any]
    loop: asyncio.AbstractEventLoop
    front: Front
    link: Link
    """To the HTTP process that has it."""
    reward: float | None = None
    error: str | None = None
    is_claimed: bool = False
    """Whether a program has asked for it; `claimed` says so to the event loop of its agent."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    claimed: asyncio.Event = field(default_factory=asyncio.Event)
    closed: Future[tuple[dict[str, int], list[list[int]]]] = field(default_factory=Future)
    """Its counts, and the tokens up to the end of each turn that is taken back."""

    def claim(self) -> None:
        """A program plays it now."""
        self.is_claimed = True
        self.loop.call_soon_threadsafe(self.claimed.set)

    def end(self, error: str | None = None) -> None:
        """Its program has ended it, or has failed."""
        self.error = error
        for event in (self.claimed, self.over):
            self.loop.call_soon_threadsafe(event.set)

    def ask(self, poster: TurnPoster, ids: list[int], max_tokens: int, stop: list[str]) -> None:
        """Asks for a turn of the conversation, from the server's thread."""

        def settle(output: Output | Exception) -> None:
            if isinstance(output, Output):
                poster.end(output)
            elif isinstance(output, TooManyRows):
                poster.fail(ApiError(f"{output}.", code="max_rows"))
            else:
                limits = self.chat.limits
                poster.fail(ContextFull(len(ids), limits.prompt + limits.response))

        on_progress = poster.more if poster.streams else None
        self.chat.request_behind(ids, settle, on_progress, max_tokens=max_tokens, stop=stop)


class Programs:
    """The server of a run, and the programs that it starts. A context manager; `lead` is the agent."""

    def __init__(self, settings: AgentSettings, model: ServedModel, say: Callable[[str], None]) -> None:
        assert settings.program is not None
        self.settings, self.model, self._say = settings, model, say
        outside = settings.program == EXTERNAL_PROGRAM
        self.asks = outside or settings.program_per == "run"
        """Whether programs ask for samples, instead of being started for one."""
        given = os.environ.get(KEY_VARIABLE)
        if outside and not given:
            raise UserError(
                f"{KEY}.program=outside: programs elsewhere need a key to ask for samples with.\n"
                f"  to do:  set the environment variable {KEY_VARIABLE} for the run and for the programs"
            )
        self.run_key = given or secrets.token_urlsafe(24)
        self.command = None if outside else find_command(settings)
        self._sessions: dict[str, Session] = {}
        self._closing: dict[str, Session] = {}
        # Samples for programs that ask. The server's thread takes from it what the agents' thread puts in.
        self._unclaimed = deque[Session]()
        self._slots = Slots(settings.max_programs)
        run_key = self.run_key
        self._fronts: list[Front] = []
        self._lost = ""  # why there is no HTTP process any more
        for listener in [self._listen(number) for number in range(settings.count_http_processes())]:
            # Forked before there are threads, and before a model is loaded.
            process = ServerProcess(listener, lambda link, _: Sessions(link, model, run_key).app())
            self._fronts.append(Front(process, url_of(listener)))
        self.url = self._fronts[0].url
        self._thread = LoopThread("programs")
        self._keeping: asyncio.Task[Any] | None = None
        self.counts = {"requests": 0, "changed": 0, "repeated": 0}
        self._last_asked = time.monotonic()
        self._finished = 0

    def __enter__(self) -> Programs:
        async def connect() -> None:
            for front in self._fronts:
                self._connect(front)

        self._thread.start(connect()).result(_START_S)
        if self.command is None:
            self._say(f"Programs ask for samples at {self.url}/s/next, with the key of {KEY_VARIABLE}.")
        elif self.asks:
            self._thread.start(self._keep_program(self.command))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(Exception):
            self._thread.start(self._stop()).result(_START_S)
        self._thread.stop()
        for front in self._fronts:
            front.process.close()

    def check(self) -> None:
        """UserError where no HTTP process is left, and none can be started: all samples would fail."""
        if self._lost:
            raise UserError(
                f"programs cannot reach the run any more: its HTTP process has ended, and no other can be started "
                f"({self._lost}).\n  to do:  see what it printed above, and start the run again: it continues from its "
                "last checkpoint"
            )

    async def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])  # until the program has ended
        for front in self._fronts:
            front.process.close_link()

    def _listen(self, number: int) -> socket.socket:
        port = self.settings.port and self.settings.port + number
        try:
            return listen(self.settings.host, port)
        except OSError as error:
            address = f"{KEY}.host={self.settings.host}, {KEY}.port={port}"
            raise UserError(
                f"{address}: the server of the programs cannot listen there: {error.strerror or error}.\n"
                f"  to do:  leave {KEY}.port out: any free port is taken"
            ) from None

    def _connect(self, front: Front) -> Link:
        """Starts an HTTP process, or its successor, in the server's thread."""

        def receive(words: list[Any], ids: list[int], values: list[float]) -> None:
            self._receive(link, words, ids)

        link = front.link = front.process.start({}, receive, lambda how: self._lose(front, how))
        return link

    def _lose(self, front: Front, how: str) -> None:
        """An HTTP process is gone, and with it all that it knew of samples that are being played."""
        front.link, again = None, "another one is started"
        everyone = tuple(self._sessions.values())
        waiting = {session for session in tuple(self._unclaimed) if session.front is front}
        lost = [session for session in (*everyone, *self._closing.values()) if session.front is front]
        try:
            link = self._connect(front)
            for session in waiting:
                session.link = link
                link.post(["open", session.id, session.key])
            for session in everyone:
                self._say_where(session, session.front.url)
        except RuntimeError as error:
            waiting, again = set(), str(error)
            if not any(one.link for one in self._fronts):
                self._lost = again
        lost = [session for session in lost if session not in waiting]
        for session in lost:
            session.end(f"the HTTP process of the run has ended ({how})")
            _resolve(session.closed, ({}, []))
        self._say(f"note: the HTTP process that serves programs has ended ({how}): {len(lost)} samples fail; {again}.")

    def _say_where(self, session: Session, url: str | None) -> None:
        """Programs that ask may send all requests to the run's address: the first process forwards what others have."""
        first = self._fronts[0]
        if self.asks and session.front is not first and first.link is not None:
            first.link.post(["elsewhere", session.id, url])

    # -- the agent ------------------------------------------------------------------------------------------------
    async def lead(self, chat: Chat, row: dict[str, Any]) -> float | None:
        """Leads a conversation until its program has ended; gives its reward, or None for the reward function."""
        if self.asks:
            return await self._wait_for_program(self._open(chat, row))
        await chat.pause(self._slots.take())
        try:
            session = self._open(chat, row)
            try:
                await self._run_program(session)
                return session.reward
            finally:
                await self._close(session)
        finally:
            self._slots.give_back()

    async def _wait_for_program(self, session: Session) -> float | None:
        """Until a program that asked for it has posted a reward, or has said that it ended."""
        self._unclaimed.append(session)
        try:
            await session.chat.pause(self._wait_for_claim(session))
            await session.over.wait()
            if session.error is not None:
                raise ProgramFailed(session.error)
            return session.reward
        finally:
            with suppress(ValueError):  # it was claimed
                self._unclaimed.remove(session)
            await self._close(session)

    async def _wait_for_claim(self, session: Session) -> None:
        while not session.claimed.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(session.claimed.wait(), QUIET_S)
            # Samples may wait long because all programs are busy. One that asks for no sample at all is another matter.
            if not session.claimed.is_set() and time.monotonic() - self._last_asked >= QUIET_S:
                self._last_asked = time.monotonic()  # said once for all samples that wait, and again after as long
                self._say(
                    f"note: no program has asked for a sample for {QUIET_S:.0f} s; they ask at {self.url}/s/next."
                )

    def _open(self, chat: Chat, row: dict[str, Any]) -> Session:
        task = json.loads(json.dumps({**row, "messages": chat.messages}, default=_plain))
        key = self.run_key if self.asks else secrets.token_urlsafe(24)
        id, working = secrets.token_urlsafe(12), [front for front in self._fronts if front.link is not None]
        front = min(working, key=lambda front: front.sessions, default=None)
        if front is None or (link := front.link) is None:
            raise ProgramFailed("the HTTP process of the run has ended, and cannot be started again")
        session = self._sessions[id] = Session(id, key, chat, task, asyncio.get_running_loop(), front, link)
        front.sessions += 1
        link.post(["open", id, key])
        self._say_where(session, front.url)
        return session

    async def _close(self, session: Session) -> None:
        """Takes back turns without a consequence, and counts what the program did."""
        self._sessions.pop(session.id, None)
        session.front.sessions -= 1
        self._say_where(session, None)
        if session.link is not session.front.link:  # what it knew of the session is lost
            return
        self._closing[session.id] = session
        session.link.post(["close", session.id])
        try:
            counts, unused = await asyncio.wait_for(asyncio.wrap_future(session.closed), _START_S)
        except TimeoutError:
            return
        finally:
            del self._closing[session.id]
        for ids in unused:
            session.chat.drop_turn(ids)
        for name, count in counts.items():
            self.counts[name] += count
        session.chat.facts.update(counts)

    async def _run_program(self, session: Session) -> None:
        assert self.command is not None
        with tempfile.TemporaryDirectory(prefix="posttrain-program-") as folder:
            reward_file = Path(folder) / "reward"
            variables = self._variables(session, reward_file)
            output = Path(folder) / "output"
            async with Program(self.command, variables, output, memory_gb=self.settings.memory_gb) as program:
                ended, lost = asyncio.ensure_future(program.wait()), asyncio.ensure_future(session.over.wait())
                await asyncio.wait([ended, lost], return_when=asyncio.FIRST_COMPLETED)
                lost.cancel()
                if session.error is not None:
                    raise ProgramFailed(session.error)
                status = await ended
            if reward_file.is_file():
                session.reward = read_reward(reward_file)
            if status:
                raise ProgramFailed(f"it ended with {describe_status(status)}{program.last_words()}")

    async def _keep_program(self, command: list[str]) -> None:
        """Runs the program of the run, whenever samples wait. With it fail those that it had; all others too where it
        has finished none, so that a program that cannot work does not start for ever."""
        self._keeping = asyncio.current_task()
        with tempfile.TemporaryDirectory(prefix="posttrain-program-") as folder:
            output, variables = Path(folder) / "output", addresses(self.url, self.run_key)
            variables["POSTTRAIN_RUN_URL"] = self.url
            while True:
                while not self._unclaimed:
                    await asyncio.sleep(_LOOK_S)
                self._finished, self._last_asked = 0, time.monotonic()
                async with Program(command, variables, output, memory_gb=self.settings.memory_gb) as program:
                    ended = asyncio.ensure_future(program.wait())
                    while not ended.done() and not self._is_stuck():
                        await asyncio.wait([ended], timeout=_LOOK_S)
                    why = f"ended with {describe_status(ended.result())}" if ended.done() else "asked for no sample"
                lost = [one for one in tuple(self._sessions.values()) if one.is_claimed or not self._finished]
                for session in lost:
                    session.end(f"the program of the run {why}{program.last_words()}")

    def _is_stuck(self) -> bool:
        """Whether samples wait while the program plays none, and asks for none."""
        waits = bool(self._unclaimed) and not any(one.is_claimed for one in tuple(self._sessions.values()))
        return waits and time.monotonic() - self._last_asked > self.settings.timeout_s

    def _variables(self, session: Session, reward_file: Path) -> dict[str, str]:
        base, task = f"{session.front.url}/s/{session.id}", json.dumps(session.task, ensure_ascii=False)
        given = addresses(base, session.key)
        given |= {"POSTTRAIN_SESSION_URL": base, "POSTTRAIN_REWARD_FILE": str(reward_file)}
        if len(task.encode()) < _LONGEST_VARIABLE:
            given["POSTTRAIN_TASK"] = task
        return given

    # -- messages of the HTTP process, in the server's thread -----------------------------------------------------
    def _receive(self, link: Link, words: list[Any], ids: list[int]) -> None:
        kind, *rest = words
        if kind == "ask":
            number, given = rest
            poster = TurnPoster(link, number, streams=given["streams"])
            session = self._sessions.get(given["session"])
            if session is None:
                poster.fail(_gone())
            else:
                session.ask(poster, ids, given["max_tokens"], given["stop"])
        elif kind == "call":
            number, name, id, body = rest
            try:
                link.post(["said", number, self._routes[name](id, body)])
            except Exception as error:  # what a program sends must not end the link that all programs share
                link.post(["refused", number, described(error)])
        elif kind == "closed":
            id, counts, lengths = rest
            if (session := self._closing.get(id)) is not None:
                ends = list(itertools.accumulate(lengths, initial=0))
                unused = [ids[start:end] for start, end in itertools.pairwise(ends)]
                _resolve(session.closed, (counts, unused))
        elif kind == "note":
            self._say(f"note: {rest[0]}")

    @property
    def _routes(self) -> dict[str, Callable[[str, Any], dict[str, Any]]]:
        return {"reward": self._take_reward, "task": self._give_task, "end": self._end, "next": self._give_next}

    def _session(self, id: str) -> Session:
        if id not in self._sessions:
            raise _gone()
        return self._sessions[id]

    def _take_reward(self, id: str, body: Any) -> dict[str, Any]:
        self._session(id).reward = parse_reward(body)
        return self._end(id, {}) if self.asks else {"ok": True}

    def _give_task(self, id: str, body: Any) -> dict[str, Any]:
        return self._session(id).task

    def _end(self, id: str, body: Any) -> dict[str, Any]:
        """Ends a sample; with `{"error": "why"}` it has failed."""
        error = body.get("error") if isinstance(body, dict) else None
        self._session(id).end(None if error is None else str(error)[:_LONGEST_ERROR])
        self._finished += 1
        return {"ok": True}

    def _give_next(self, id: str, body: Any) -> dict[str, Any]:
        """A sample that no program has yet, for programs that ask."""
        if id != "next" or not self.asks:
            raise ApiError(f"There is no POST /s/{id} here.", status=404)
        self._last_asked = time.monotonic()
        with suppress(IndexError):  # there is none
            session = self._unclaimed.popleft()
            session.claim()
            base = f"{session.front.url}/s/{session.id}"
            return {"id": session.id, "base_url": f"{base}/v1", "task": session.task}
        return {"id": None}

    @property
    def waiting(self) -> int:
        """Conversations that no program leads yet: others must end first, or none has asked for them."""
        if self.asks:
            return len(self._unclaimed)
        return self._slots.waiting

    def troubles(self) -> list[str]:
        """What the user should know at the end of a run."""
        counts = self.counts
        if not counts["changed"]:
            return []
        return [
            f"programs: {counts['changed']} of {counts['requests']} requests had changed an earlier turn of the model; "
            "each began a further row of its sample"
        ]


def _gone() -> ApiError:
    return ApiError("This session has ended, or never was.", status=404)  # never 409: clients retry that


def _resolve(future: Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _plain(value: Any) -> Any:
    """Values of a row that JSON has no form for: arrays of numbers become lists."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
