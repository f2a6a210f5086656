"""Requests that one engine answers, for clients without sessions."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Protocol

from posttrain.conversations.serving.app import Channel
from posttrain.conversations.serving.model import Prompt
from posttrain.conversations.serving.requests import Answer, ApiError, ModelRequest
from posttrain.conversations.serving.retries import Retries
from posttrain.rollout.base import Output, Request, Sampling


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
    """All requests go to one engine."""

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
