"""The server side: an engine that executes the requests of one run over HTTP, in the order of the requests.

The run decides when the engine steps, so that its schedule depends on tokens alone, as in the run's own process. A run
that connects takes over the server, because a killed run could not release it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from aiohttp import web

from posttrain.errors import UserError
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.generate import admission_deadline, advance
from posttrain.rollout.server.ranks import RankError
from posttrain.rollout.server.wire import ROOT, SESSION, VERSION, read_bucket, read_request, write_output

ALIVE_S = 5.0  # heartbeat interval while the engine computes
_LOG = logging.getLogger(__name__)


class EngineHost:
    """An engine and the run that uses it. A run may request each of its methods; one thread calls them."""

    def __init__(self, engine: RolloutEngine, description: dict[str, Any]) -> None:
        """A run compares `description` with its own model."""
        self.engine, self.description = engine, description
        self.session, self.run = secrets.token_hex(8), "(none)"  # until one connects
        self.requests: dict[int, bool] = {}  # id of each active or cached request -> whether to keep its KV cache

    def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A run takes over the server; the requests of the previous run are aborted."""
        self.engine.abort(self.requests)
        self.engine.release(self.requests)
        self.requests = {}
        self.engine.wake()
        self.session, self.run = secrets.token_hex(8), str(body["run"])
        return {**self.description, "session": self.session}

    def advance(self, body: dict[str, Any]) -> dict[str, Any]:
        """Queue requests, and step: once, or until a request has finished or new ones should be admitted."""
        engine = self.engine
        for one in body["submit"]:
            engine.submit(read_request(one))
            self.requests[one["id"]] = one["keep"]
        ended = engine.step() if body["once"] else advance(engine, admission_deadline(engine))
        self._forget(output.id for output in ended if not self.requests[output.id])  # pyright: ignore
        return {"ended": [write_output(output) for output in ended], "running_tokens": engine.running_tokens()}

    def abort(self, body: dict[str, Any]) -> list[Any]:
        self._forget(body["ids"])
        return [write_output(output) for output in self.engine.abort(body["ids"])]

    def release(self, body: dict[str, Any]) -> None:
        self._forget(body["ids"])
        self.engine.release(body["ids"])

    def _forget(self, ids: Iterable[Any]) -> None:
        for id in ids:
            self.requests.pop(id, None)

    def score(self, body: dict[str, Any]) -> list[list[float]]:
        scored = self.engine.score(body["rows"], temperature=body["temperature"])
        return [one.double().tolist() for one in scored]

    def sleep(self, body: dict[str, Any]) -> None:
        self.engine.sleep()

    def wake(self, body: dict[str, Any]) -> None:
        self.engine.wake(*body["stages"])

    def cache_bytes(self, body: dict[str, Any]) -> int:
        return self.engine.cache_bytes()

    def load_weights(self, body: bytes, version: int) -> None:
        """Load a bucket if its checksums are right."""
        bucket = read_bucket(body)
        bucket.check()
        self.engine.load_weights(bucket.tensors.items(), version)


CALLS = ("open", "advance", "abort", "release", "score", "sleep", "wake", "cache_bytes")


def make_app(host: EngineHost, key: str, lost: asyncio.Future[str] | None = None) -> web.Application:
    """The application. Every request must contain the key, as `Authorization: Bearer KEY`. `lost` gets a result, in
    the loop that serves, when the engine can answer no more: calls that wait for it are answered with that."""
    app = web.Application(client_max_size=0)  # a bucket may be as large as the largest weight
    thread = ThreadPoolExecutor(1, "rollout")  # the engine is called nowhere else

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    def handler(name: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
                return web.json_response({"error": "the key is missing or wrong"}, status=401)
            if name != "open" and request.headers.get(SESSION) != host.session:
                return web.json_response({"error": f"the run {host.run} has taken this server over"}, status=410)
            body = await request.read()
            if name == "load_weights":
                work = lambda: host.load_weights(body, int(request.headers[VERSION]))  # noqa: E731
            else:
                work = lambda: getattr(host, name)(json.loads(body))  # noqa: E731
            return await _answer(request, asyncio.get_running_loop().run_in_executor(thread, work), lost)

        return handle

    app.router.add_get("/health", health)
    for name in (*CALLS, "load_weights"):
        app.router.add_post(f"{ROOT}/{name}", handler(name))
    return app


async def _answer(
    request: web.Request, working: asyncio.Future[Any], lost: asyncio.Future[str] | None
) -> web.StreamResponse:
    """`{"result": ...}` or `{"error": ...}`. While the engine computes, the server sends a space every ALIVE_S seconds
    as a heartbeat: JSON may begin with spaces. A client can so notice a lost machine without knowing how long a step
    takes."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    awaited = [working] if lost is None else [working, lost]
    while not any(one.done() for one in awaited):
        await asyncio.wait(awaited, timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
        if not any(one.done() for one in awaited):
            with suppress(ConnectionResetError):
                await response.write(b" ")
    try:
        if lost is not None and lost.done() and not working.done():
            raise RankError(lost.result())
        said: dict[str, Any] = {"result": working.result()}
    except Exception as error:
        if not isinstance(error, UserError):
            _LOG.exception("a call failed")
        said = {"error": f"{type(error).__name__}: {error}"}
    await response.write(json.dumps(said).encode())
    await response.write_eof()
    return response
