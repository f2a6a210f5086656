"""An engine that works in another process, as the HTTP process sees it, and the other end of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any

from posttrain.conversations.serving.requests import ApiError, ContextFull
from posttrain.conversations.serving.wire import Link
from posttrain.rollout.base import Output, Request, Sampling

OnProgress = Callable[[Output], None]


class Turns:
    """Turns that the engine's process was asked for. Cancelling a call aborts its turn."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._numbers = count()
        self._waiting: dict[int, tuple[asyncio.Future[Output], Output, OnProgress | None]] = {}

    async def ask(self, ids: list[int], given: Mapping[str, Any], on_progress: OnProgress | None) -> Output:
        """The turn behind these tokens. `on_progress` is called with what it has so far."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = future, Output(number, [], [], ""), on_progress
        self.link.post(["ask", number, {**given, "streams": on_progress is not None}], ids)
        try:
            return await future
        except asyncio.CancelledError:
            self.link.post(["abort", number])
            raise
        finally:
            self._waiting.pop(number, None)

    def receive(self, kind: str, number: int, what: Any, ids: list[int], values: list[float]) -> None:
        """Takes `more` tokens of a turn, its `end` with the finish reason, or that it `failed`."""
        future, output, on_progress = self._waiting.get(number, (None, None, None))
        if future is None or output is None or future.done():  # its client has gone
            return
        if kind == "failed":
            future.set_exception(error_of(what))
            return
        output.token_ids += ids
        output.log_probs = [*output.log_probs, *values]
        if kind == "end":
            output.finish_reason = what
            future.set_result(output)
        elif on_progress is not None:
            on_progress(output)


class TurnPoster:
    """The engine's end of one turn: sends what is new of it."""

    def __init__(self, link: Link, number: int, *, streams: bool) -> None:
        self.link, self.number, self.streams = link, number, streams
        self._sent = 0

    def more(self, output: Output) -> None:
        """What the turn has so far."""
        if len(output.token_ids) > self._sent:
            self._post(["more", self.number, None], output)

    def end(self, output: Output) -> None:
        self._post(["end", self.number, output.finish_reason], output)

    def fail(self, error: Exception) -> None:
        self.link.post(["failed", self.number, described(error)])

    def _post(self, words: list[Any], output: Output) -> None:
        ids, values = output.token_ids[self._sent :], output.log_probs[self._sent :]
        self._sent = len(output.token_ids)
        self.link.post(words, ids, values)


def described(error: Exception) -> dict[str, Any]:
    """An error as it travels."""
    found: dict[str, Any] = {"message": str(error)}
    if isinstance(error, ApiError):
        found |= {"status": error.status, "param": error.param, "code": error.code}
    else:
        found |= {"message": f"The server failed: {type(error).__name__}: {error}", "status": 500}
    if isinstance(error, ContextFull):
        found |= {"tokens": error.tokens, "most": error.most}
    return found


def error_of(found: Mapping[str, Any]) -> ApiError:
    """The error that `described` was given."""
    if "tokens" in found:
        return ContextFull(found["tokens"], found["most"])
    return ApiError(found["message"], status=found.get("status", 500), param=found.get("param"), code=found.get("code"))


class RemoteServer:
    """`generate(request)` by the `Server` of another process (`server.py`), whose end is a `ServerHost`."""

    def __init__(self, link: Link) -> None:
        self._link, self._turns = link, Turns(link)

    async def generate(self, request: Request, on_progress: OnProgress | None = None) -> Output:
        given = {"id": request.id, "sampling": asdict(request.sampling), "seed": request.seed}
        given |= {"parent": request.parent, "keep": request.keep}
        output = await self._turns.ask(list(request.prompt_ids), given, on_progress)
        output.id = request.id
        return output

    def release(self, id: Hashable) -> None:
        self._link.post(["release", id])

    def receive(self, words: list[Any], ids: list[int], values: list[float]) -> None:
        kind, number, what = words
        self._turns.receive(kind, number, what, ids, values)


class ServerHost:
    """Answers a `RemoteServer` by a server of this process. `life` numbers the HTTP processes, which all count their
    requests from 0."""

    def __init__(self, server: Any, life: int) -> None:
        self.server, self.life = server, life
        self.link: Link | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def receive(self, words: list[Any], ids: list[int], values: list[float]) -> None:
        kind, number, *rest = words
        if kind == "ask":
            self._tasks[number] = asyncio.ensure_future(self._answer(number, ids, *rest))
        elif kind == "abort" and number in self._tasks:
            self._tasks[number].cancel()
        elif kind == "release":
            self.server.release((self.life, number))

    async def _answer(self, number: int, ids: list[int], given: dict[str, Any]) -> None:
        assert self.link is not None
        poster = TurnPoster(self.link, number, streams=given["streams"])
        parent = None if given["parent"] is None else (self.life, given["parent"])
        sampling = Sampling(**{key: _tupled(value) for key, value in given["sampling"].items()})
        request = Request((self.life, given["id"]), ids, sampling, given["seed"], parent, given["keep"])
        try:
            poster.end(await self.server.generate(request, poster.more if poster.streams else None))
        except Exception as error:
            poster.fail(error)
        finally:
            del self._tasks[number]

    def end(self) -> None:
        """No client waits any longer: whatever is under way is aborted."""
        for task in self._tasks.values():
            task.cancel()


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
