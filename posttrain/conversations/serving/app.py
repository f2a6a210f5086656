"""The HTTP application: routes, the key, streams as server-sent events, and clients that go away.

A session's routes are those of the server, under `/s/ID`. A client that disconnects cancels its handler (aiohttp's
`handler_cancellation`), which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

from aiohttp import web

from posttrain.conversations.serving import anthropic, openai_chat, openai_completions, openai_responses, token_ids
from posttrain.conversations.serving.model import Ledger as LedgerProtocol
from posttrain.conversations.serving.model import Pending, Sampler, ServedModel
from posttrain.conversations.serving.requests import Answer, ApiError, Delta, ModelRequest
from posttrain.conversations.tools.arguments import well_formed_json
from posttrain.texts import utf8

LONGEST_BODY = 64 * 2**20
_BEARER = re.compile(r"\ABearer ", re.IGNORECASE)
KEEP_ALIVE_S = 15.0
LONG_PROMPT = 100_000
"""Characters of a prompt from which on it is tokenized in a thread: 60 MB take a minute, in which no other request
would be answered."""
_LOG = logging.getLogger(__name__)
Made = TypeVar("Made")


@dataclass(frozen=True)
class Channel:
    """What a request is answered with: a source of tokens, and a ledger if it belongs to a session."""

    sampler: Sampler
    ledger: LedgerProtocol | None = None
    reading: asyncio.Lock | None = None
    """Held while the ledger matches a request, which for a long prompt happens in a thread."""


class Channels(Protocol):
    """Finds the channel of a request; `session` is None outside of sessions."""

    def key(self, session: str | None) -> str | None:
        """The key that a request must bring."""
        ...

    def session_of(self, session: str | None, request: ModelRequest) -> str | None:
        """The session that a request belongs to: that of its address, or one that the request names."""
        ...

    def channel(self, session: str | None, request: ModelRequest) -> Channel: ...

    async def once(self, session: str | None, key: Any, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer; a retry of the same request joins the first."""
        ...


Route = tuple[str, str, Callable[[str, Any], Awaitable[Any]]]
"""(method, path below a session, what it does with the session's id and the body)."""


def make_app(model: ServedModel, channels: Channels, routes: Sequence[Route] = ()) -> web.Application:
    """The application. Where a key is set every request must bring it, as `Authorization: Bearer KEY` or `x-api-key`.
    `routes` are more of them, below `/s/ID`."""
    app = web.Application(client_max_size=LONGEST_BODY)
    handlers = _Handlers(model, channels)
    for root in ("", "/s/{session}"):
        # A request is compared with the routes in this order: turns come first.
        for path, api in (
            ("/v1/chat/completions", openai_chat),
            ("/v1/completions", openai_completions),
            ("/v1/responses", openai_responses),
            ("/v1/messages", anthropic),
            ("/inference/v1/generate", token_ids),
        ):
            app.router.add_post(root + path, handlers.guarded(handlers.answering(api), api))
        app.router.add_post(f"{root}/v1/messages/count_tokens", handlers.guarded(handlers.count_tokens, anthropic))
        app.router.add_post(f"{root}/tokenize", handlers.guarded(handlers.tokenize, token_ids))
        app.router.add_get(f"{root}/v1/models", handlers.guarded(handlers.models, openai_chat))
        app.router.add_get(f"{root}/v1/models/{{name:.+}}", handlers.guarded(handlers.one_model, openai_chat))
    for method, path, work in routes:
        app.router.add_route(method, f"/s/{{session}}{path}", handlers.guarded(handlers.working(work), openai_chat))
    app.router.add_get("/health", handlers.health)
    app.middlewares.append(_other_routes)
    return app


@web.middleware
async def _other_routes(request: web.Request, handler: Any) -> web.StreamResponse:
    """A route that does not exist is an error in JSON, as clients expect it."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        what = f"{request.method} {request.path}"
        words = {404: f"There is no {what} here.", 405: f"{what} is not allowed."}.get(error.status, str(error.reason))
        return web.json_response(openai_chat.error(ApiError(words, status=error.status)), status=error.status)


class _Handlers:
    def __init__(self, model: ServedModel, channels: Channels) -> None:
        self.model, self.channels = model, channels
        self._long_prompts = ThreadPoolExecutor(1, "long prompts")  # one after the other: each takes much memory

    def guarded(self, work: Callable[[web.Request], Awaitable[web.StreamResponse]], api: ModuleType) -> Any:
        """The handler of a route: checks the key, and writes errors in the API's form."""

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                self._check_key(request)
                return await work(request)
            except ApiError as error:
                return web.json_response(api.error(error), status=error.status)
            except web.HTTPRequestEntityTooLarge:
                problem = ApiError(f"The body is too large: a request has at most {LONGEST_BODY} bytes.", status=413)
                return web.json_response(api.error(problem), status=413)
            except (asyncio.CancelledError, web.HTTPException, ConnectionResetError):
                raise
            except Exception as error:
                _LOG.exception("a request failed")
                problem = ApiError(f"The server failed: {type(error).__name__}: {error}", status=500)
                return web.json_response(api.error(problem), status=500)

        return handle

    def _check_key(self, request: web.Request) -> None:
        key = self.channels.key(request.match_info.get("session"))
        if key is None:
            return
        given = _BEARER.sub("", request.headers.get("Authorization", "")) or request.headers.get("x-api-key", "")
        if not hmac.compare_digest(utf8(given), utf8(key)):
            raise ApiError("The API key is missing or wrong (Authorization: Bearer KEY).", status=401)

    def working(self, work: Callable[[str, Any], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = await _body(request) if request.can_read_body else {}
            return web.json_response(await work(request.match_info["session"], body))

        return handle

    # -- models and tokens ----------------------------------------------------------------------------------------
    async def health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def _described(self) -> dict[str, Any]:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "posttrain",
            "max_model_len": model.max_model_len,
        }

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def one_model(self, request: web.Request) -> web.Response:
        self.model.check_name(request.match_info["name"])
        return web.json_response(self._described())

    async def tokenize(self, request: web.Request) -> web.Response:
        wanted, opens = token_ids.read_tokenize(await _body(request))
        self.model.check(wanted)

        def tokenize() -> list[int]:
            return self.model.prompts(wanted)[0].ids if wanted.prompts else self.model.render(wanted, opens=opens)

        ids = await self._read(wanted, tokenize)
        return web.json_response({"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": ids})

    async def count_tokens(self, request: web.Request) -> web.Response:
        wanted = anthropic.read(await _body(request), counts=True)
        self.model.check(wanted)
        (prompt,) = await self._read(wanted, lambda: self.model.prompts(wanted))
        return web.json_response({"input_tokens": len(prompt.ids)})

    async def _read(self, wanted: ModelRequest, work: Callable[[], Made]) -> Made:
        """What `work` makes of a request's prompt; of a long one in a thread."""
        if wanted.length < LONG_PROMPT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._long_prompts, work)

    async def _begin(self, wanted: ModelRequest, channel: Channel) -> Pending:
        """The checked request. One that a ledger must match waits for those before it in its session."""
        async with channel.reading or nullcontext():
            return await self._read(wanted, lambda: self.model.begin(wanted, channel.ledger))

    # -- answers --------------------------------------------------------------------------------------------------
    def answering(self, api: ModuleType) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            wanted: ModelRequest = api.read(await _body(request))
            session = self.channels.session_of(request.match_info.get("session"), wanted)
            channel = self.channels.channel(session, wanted)
            key = _retry_key(request, await request.read())
            if wanted.stream:
                return await self._stream(request, api, wanted, session, channel, key)

            async def make() -> Answer:
                return await self.model.finish(await self._begin(wanted, channel), channel.sampler)

            return web.json_response(api.write(wanted, await self.channels.once(session, key, make)))

        return handle

    async def _stream(
        self,
        request: web.Request,
        api: ModuleType,
        wanted: ModelRequest,
        session: str | None,
        channel: Channel,
        key: Any,
    ) -> web.StreamResponse:
        """The answer as server-sent events. What is wrong with the request is found before the first of them, unless
        that takes long, or a retry waits for the request that it repeats: then comments keep the connection open."""
        pieces = asyncio.Queue[Delta]()
        begun: asyncio.Future[Pending] = asyncio.get_running_loop().create_future()

        async def make() -> Answer:
            pending = await self._begin(wanted, channel)
            begun.set_result(pending)
            return await self.model.finish(pending, channel.sampler, pieces.put_nowait)

        making = asyncio.ensure_future(self.channels.once(session, key, make))
        try:
            response = await _keep_alive(request, [making, begun])
            if not begun.done():  # it failed, or another request had asked for the same
                try:
                    answer = await making
                except ApiError as error:
                    if response is None:
                        raise
                    return await _end_stream(response, api, error)
                pieces = asyncio.Queue()
                for choice in answer.choices:
                    output = choice.output
                    ids, logged = output.token_ids, [float(one) for one in output.log_probs]
                    pieces.put_nowait(Delta(choice.index, choice.turn.text, choice.turn.thinking, ids, logged, choice))
            else:
                answer = begun.result().answer
            response = response or await _open_stream(request)
            stream = api.Stream(wanted, answer)
            await _write(response, stream.start())
            while not (making.done() and pieces.empty()):
                await self._next_pieces(response, stream, pieces, making)
            try:
                await _write(response, stream.end(await making))
            except ApiError as error:
                return await _end_stream(response, api, error)
            except Exception as error:  # the status is sent already: the error is an event
                _LOG.exception("a stream failed")
                return await _end_stream(response, api, ApiError(f"The server failed: {error}", status=500))
            await response.write_eof()
            return response
        finally:
            making.cancel()

    async def _next_pieces(self, response: Any, stream: Any, pieces: asyncio.Queue[Delta], making: Any) -> None:
        """Writes what is there, or waits for it; a comment keeps the connection open meanwhile."""
        piece = asyncio.ensure_future(pieces.get())
        try:
            await asyncio.wait([piece, making], timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if piece.done():
                await _write(response, stream.delta(piece.result()))
            elif not making.done():
                await response.write(b": waiting\n\n")
        finally:
            if not piece.done():
                piece.cancel()
                with suppress(asyncio.CancelledError):
                    await piece


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


async def _end_stream(response: web.StreamResponse, api: ModuleType, error: ApiError) -> web.StreamResponse:
    """The status is sent already: the error is an event."""
    await _write(response, [api.error(error)])
    await response.write_eof()
    return response


async def _keep_alive(request: web.Request, wanted: list[asyncio.Future[Any]]) -> web.StreamResponse | None:
    """Waits for one of these; the stream, if comments had to keep it open meanwhile."""
    response = None
    while not (await asyncio.wait(wanted, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
        response = response or await _open_stream(request)
        await response.write(b": waiting\n\n")
    return response


async def _body(request: web.Request) -> Any:
    """The JSON of a body. Halves of characters, which JSON can spell and no tokenizer takes, are replaced."""
    data = await request.read()
    try:
        body = json.loads(data)
        return well_formed_json(body) if b"\\u" in data else body
    except (ValueError, RecursionError) as error:
        raise ApiError(f"The body is not JSON: {error}") from None


def _retry_key(request: web.Request, body: bytes) -> tuple[bool, Any]:
    """(whether this may repeat an earlier request, what the two have in common). Clients send no other sign of a retry,
    and the very same bytes once more. A key that comes with other bytes is that of another request."""
    named = request.headers.get("Idempotency-Key")
    again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
    return again or named is not None, (named, request.path, hashlib.blake2b(body).digest())


async def _write(response: web.StreamResponse, events: Any) -> None:
    """Server-sent events; those with a type are named by it, as Anthropic's and OpenAI's responses are."""
    for event in events:
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
        name = f"event: {event['type']}\n" if isinstance(event, dict) and isinstance(event.get("type"), str) else ""
        await response.write(f"{name}data: {text}\n\n".encode())
