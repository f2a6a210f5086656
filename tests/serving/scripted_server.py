"""A server over an engine that writes what a script says, a token a step, and a client that speaks plain HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from posttrain.conversations.format_proof import choose_format
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.server import Server
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.templates import MessageTemplate
from posttrain.rollout.base import Output, Request, RolloutEngine, Sampling
from tests.tools.call_templates import tokenizer_of

pytest.importorskip("aiohttp")
from aiohttp.test_utils import TestClient, TestServer

from posttrain.conversations.serving.app import make_app
from posttrain.conversations.serving.sessions import LocalChannels

END = "<|im_end|>"
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
Script = Callable[[str, int], str]


class ScriptedEngine(RolloutEngine):
    """Writes `script(what the model has read, the seed)`, one token of every request a step. With `hold`, none."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.running: dict[Any, tuple[Request, list[int], list[int]]] = {}
        self.seen: list[Request] = []
        self.aborted: list[Any] = []
        self.released: list[Any] = []
        self.hold = False
        self.decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)

    def submit(self, request: Request) -> None:
        self.check_request(request)
        text = self.script(self.decode(list(request.prompt_ids)), request.seed)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: request.sampling.max_tokens]
        self.seen.append(request)
        self.running[request.id] = (request, ids, [])

    def step(self) -> list[Output]:
        ended = []
        for id, (request, ids, made) in list(self.running.items()):
            if self.hold:
                continue
            made.append(ids[len(made)])
            text = self.decode(made)
            stopped = made[-1] in request.sampling.stop_token_ids or any(s in text for s in request.sampling.stop)
            if stopped or len(made) == len(ids):
                del self.running[id]
                ended.append(self._output(id, made, "stop" if stopped else "length"))
        return ended

    def _output(self, id: Any, made: list[int], reason: str) -> Output:
        return Output(id, list(made), [-0.5 - token / 1000 for token in made], reason, [(self.version, len(made))])

    def so_far(self, ids):
        return [self._output(id, made, "") for id, (_, _, made) in self.running.items() if id in ids]

    def has_work(self) -> bool:
        return bool(self.running)

    def abort(self, ids):
        gone = [id for id in ids if id in self.running]
        self.aborted += gone
        return [self._output(id, self.running.pop(id)[2], "abort") for id in gone]

    def release(self, ids) -> None:
        self.released += ids

    def score(self, token_ids, *, temperature=1.0): ...
    def load_weights(self, weights, version): ...
    def cache_bytes(self): ...
    def _give_back(self): ...
    def _take(self, stage): ...


class Client:
    """`await client.post(path, body)` gives (status, answer); a stream gives its events."""

    def __init__(self, http: TestClient, engine: ScriptedEngine) -> None:
        self.http, self.engine = http, engine

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(path, data=data, headers=headers) as response:
            if response.content_type == "text/event-stream":
                return response.status, events(await response.text())
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(path, headers=headers) as response:
            return response.status, await response.json()


def events(text: str) -> list[Any]:
    """The data of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def served(tokenizer: Any, max_model_len: int = 2000) -> ServedModel:
    template = MessageTemplate(tokenizer)
    name, _ = choose_format(template, "auto")
    end = tokenizer.convert_tokens_to_ids(END)
    sampling = Sampling(max_tokens=1, stop_token_ids=(end,))
    size = len(tokenizer)
    return ServedModel("m", template, FORMATS[name], sampling, max_model_len=max_model_len, vocabulary=size)


def with_server(
    script: Script,
    work: Callable[[Client], Awaitable[Any]],
    *,
    family: str = "Qwen2.5",
    api_key: str | None = None,
    **limits: int,
) -> Any:
    """What `work(client)` gives, over a server whose model writes by the script."""

    async def main() -> Any:
        tokenizer = tokenizer_of(family)
        engine = ScriptedEngine(tokenizer, script)
        async with Server(engine) as server:
            app = make_app(served(tokenizer, **limits), LocalChannels(server, api_key))
            http = TestClient(TestServer(app, handler_cancellation=True))
            await http.start_server()
            try:
                return await asyncio.wait_for(work(Client(http, engine)), 30)
            finally:
                await http.close()

    return asyncio.run(main())
