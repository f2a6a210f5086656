"""Who answers a request: one engine (`LocalChannels`), or the sessions of a run (`Sessions`).

A session is one sample, as the HTTP process has it: a key, a ledger, and the answers of its last requests. What
programs ask about their samples (`/s/next`, `/task`, `/reward`, `/end`) is answered by the run's own process
(`programs.py`), which opens and closes the sessions.

A run may have several HTTP processes, each with its own sessions and address. Requests for another one's session that
come to the run's address, which is the first one's, are forwarded.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

from posttrain.conversations.ledger import Ledger
from posttrain.conversations.serving.app import Channel, make_app
from posttrain.conversations.serving.model import Prompt, ServedModel
from posttrain.conversations.serving.remote import Turns, error_of
from posttrain.conversations.serving.requests import Answer, ApiError, ModelRequest
from posttrain.conversations.serving.wire import Link, Receive
from posttrain.rollout.base import Output, Request, Sampling

_OF_ONE_CONNECTION = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")
"""Headers that are not forwarded."""


@dataclass(eq=False)
class _Call:
    task: asyncio.Task[Answer]
    waiting: int = 0


class Retries:
    """Answers of the last requests. Clients repeat a request that took too long or whose connection broke, and must not
    get a second sample: it joins the one under way, or gets its answer again. Without `aborts` a request goes on
    without its client, for a retry."""

    def __init__(self, most: int = 512, *, aborts: bool = True) -> None:
        self.most, self.aborts = most, aborts
        self.repeated = 0
        self._calls = OrderedDict[Hashable, _Call]()

    async def once(self, repeats: bool, key: Hashable, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer. The same body without the mark of a retry is a request of its own: a second sample."""
        call = self._calls.get(key) if repeats else None
        if call is None:
            call = _Call(asyncio.ensure_future(make()))  # pyright: ignore (a coroutine becomes a task)
            self._calls[key] = call
            self._calls.move_to_end(key)
            while len(self._calls) > self.most:
                self._calls.popitem(last=False)
        else:
            self.repeated += 1
        call.waiting += 1
        try:
            return await asyncio.shield(call.task)
        except BaseException:
            failed = call.task.done() and (call.task.cancelled() or call.task.exception() is not None)
            if self._calls.get(key) is call and (failed or (self.aborts and call.waiting == 1)):
                del self._calls[key]  # what failed is not repeated to a client, which retries for another answer
            raise
        finally:
            call.waiting -= 1
            # The last client has gone: no one reads the answer.
            if self.aborts and not call.waiting and not call.task.done():
                call.task.cancel()


@dataclass(eq=False)
class Session:
    """One sample."""

    id: str
    key: str
    turns: Turns
    ledger: Ledger
    retries: Retries = field(default_factory=lambda: Retries(aborts=False))
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def sample(
        self, prompt: Prompt, sampling: Sampling, seed: int | None, on_progress: Callable[[Output], None] | None
    ) -> Output:
        """A turn of the conversation. The run decides how it is sampled, but for its length and its stop texts."""
        given = {"session": self.id, "max_tokens": sampling.max_tokens, "stop": sampling.stop}
        return await self.turns.ask(prompt.ids, given, on_progress)


class Sessions:
    """Finds the session of a request (`app.Channels`)."""

    def __init__(self, link: Link, model: ServedModel, run_key: str) -> None:
        self.link, self.model, self.run_key = link, model, run_key
        self._turns, self._sessions = Turns(link), dict[str, Session]()
        self._elsewhere: dict[str, str] = {}  # the addresses of sessions that other processes have
        self._told = set[str]()
        self._numbers = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    def app(self) -> tuple[web.Application, Receive]:
        routes = [
            ("POST", "/reward", self._route("reward")),
            ("GET", "/task", self._route("task")),
            ("POST", "/end", self._route("end")),
            ("POST", "", self._route("next")),
        ]
        app = make_app(self.model, self, routes)
        app.middlewares.append(self._forward)
        app.cleanup_ctx.append(self._forwarding)
        return app, self.receive

    def receive(self, words: list[Any], ids: list[int], values: list[float]) -> None:
        """Takes a message of the run's process."""
        kind, *rest = words
        if kind == "open":
            id, key = rest
            self._sessions[id] = Session(id, key, self._turns, Ledger(self.model))
        elif kind == "close":
            self._close(*rest)
        elif kind == "elsewhere":
            id, url = rest
            self._elsewhere.pop(id, None) if url is None else self._elsewhere.update({id: url})
        elif kind in ("said", "refused"):
            number, what = rest
            if (future := self._calls.pop(number, None)) is not None and not future.done():
                future.set_result(what) if kind == "said" else future.set_exception(error_of(what))
        else:
            number, what = rest
            self._turns.receive(kind, number, what, ids, values)

    def _close(self, id: str) -> None:
        """Reports what is to be taken back of a session, as the lengths of prompts with turns, and its counts."""
        session = self._sessions.pop(id)
        ledger, unused = session.ledger, session.ledger.unused()
        counts = {"requests": ledger.continued + ledger.opened, "changed": ledger.changed}
        ids = [one for turn in unused for one in turn.ids]
        lengths = [len(turn.ids) for turn in unused]
        self.link.post(["closed", id, {**counts, "repeated": session.retries.repeated}, lengths], ids)

    def _route(self, name: str) -> Callable[[str, Any], Awaitable[Any]]:
        async def ask(id: str, body: Any) -> Any:
            if id != "next":
                self._session(id)
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            self._calls[number] = future
            self.link.post(["call", number, name, id, body])
            return await future

        return ask

    async def _forwarding(self, app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(None)) as client:
            self._client = client
            yield

    @web.middleware
    async def _forward(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Hands a request for a session of another process to that process, which also checks the key."""
        session, path = request.match_info.get("session"), request.path_qs
        if session is None and self._elsewhere and request.method == "POST":
            session = await _named_model(request)
            path = f"/s/{session}{path}"
        url = self._elsewhere.get(session or "")
        if url is None:
            return await handler(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        given = {"data": await request.read(), "headers": headers}
        async with self._client.request(request.method, url + path, **given) as answer:
            kind = {"Content-Type": answer.headers["Content-Type"]}
            response = web.StreamResponse(status=answer.status, headers=kind)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        await response.write_eof()
        return response

    # -- requests -------------------------------------------------------------------------------------------------
    def key(self, session: str | None) -> str | None:
        if session is None or session == "next":
            return self.run_key
        return self._session(session).key

    def session_of(self, session: str | None, request: ModelRequest) -> str | None:
        """A program that plays many samples may use one client for all: its requests name their sample as the model."""
        return session or (request.model if request.model in self._sessions else None)

    def channel(self, session: str | None, request: ModelRequest) -> Channel:
        found = self._session(session)
        names = {*request.overrides(), *(["stop_token_ids"] if request.stop_token_ids else [])}
        for name in sorted(names - self._told):
            self._told.add(name)
            self.link.post(["note", f"programs set `{name}`; the run's own settings decide how it samples."])
        return Channel(found, found.ledger, found.reading)

    async def once(self, session: str | None, key: tuple[bool, Any], make: Callable[[], Awaitable[Answer]]) -> Answer:
        found = self._session(session)
        answer = await found.retries.once(*key, make)
        found.ledger.deliver(answer)
        return answer

    def _session(self, id: str | None) -> Session:
        found = self._sessions.get(id or "")
        if found is None:  # 404, never 409: clients retry that
            raise ApiError(
                "This session has ended, or never was."
                if id
                else "Requests need a session: an address /s/ID/v1, or the ID as `model`.",
                status=404,
            )
        return found


async def _named_model(request: web.Request) -> str | None:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):  # its handler reports that
        return None
    model = body.get("model") if isinstance(body, dict) else None
    return model if isinstance(model, str) else None


class Generates(Protocol):
    """The server loop of an engine (`server.py`), or the way to one in another process (`remote.py`)."""

    async def generate(self, request: Request, on_progress: Callable[[Output], None] | None = None) -> Output: ...


class EngineSampler:
    """Samples with an engine behind its server loop. Without a seed each response has one of its own."""

    def __init__(self, server: Generates) -> None:
        self.server = server
        self._numbers = count()

    async def sample(
        self, prompt: Prompt, sampling: Sampling, seed: int | None, on_progress: Callable[[Output], None] | None
    ) -> Output:
        seed = secrets.randbits(63) if seed is None else seed
        return await self.server.generate(Request(next(self._numbers), prompt.ids, sampling, seed), on_progress)


class LocalChannels:
    """All requests go to one engine: clients have no sessions."""

    def __init__(self, server: Generates, api_key: str | None = None) -> None:
        self._channel, self._retries, self._key = Channel(EngineSampler(server)), Retries(), api_key

    def key(self, session: str | None) -> str | None:
        return self._key

    def session_of(self, session: str | None, request: ModelRequest) -> str | None:
        return session

    def channel(self, session: str | None, request: ModelRequest) -> Channel:
        if session is not None:
            raise ApiError(f"There is no session {session} here.", status=404)
        return self._channel

    async def once(self, session: str | None, key: tuple[bool, Any], make: Callable[[], Awaitable[Answer]]) -> Answer:
        return await self._retries.once(*key, make)
