"""Loads what `posttrain serve` serves, and runs its server.

The KV cache of ended requests, kept for the request that continues their conversation.

Clients of chat APIs send the whole conversation with every turn and do not say which request they continue: it is found
by its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from aiohttp import web

from posttrain.commands.generation.session import (
    explain_out_of_memory,
    find_model,
    load_module,
    load_tokenizer_of,
    make_sampling,
    plan_cache,
    read_positions,
    say,
)
from posttrain.commands.generation.settings import Settings
from posttrain.conversations.format_proof import find_format
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.server import Server
from posttrain.conversations.serving.app import make_app
from posttrain.conversations.serving.local import LocalChannels
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.templates import MessageTemplate
from posttrain.errors import UserError
from posttrain.models.loading import check_positions, end_token_ids, model_end_ids, positions_of
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import Output, Request, RolloutEngine
from posttrain.rollout.engines import build_engine, can_take_adapters
from posttrain.rollout.outside import check_installed
from posttrain.rollout.server.build import describe
from posttrain.rollout.server.host import EngineHost
from posttrain.rollout.server.host import make_app as make_rollout_app
from posttrain.workers.roles import pick_device

_BASE, _PRIME = 1_000_003, 2**61 - 1


@dataclass(frozen=True)
class EndedTurn:
    """A prompt with its response, and the prompt's length and hash."""

    ids: list[int]
    prompt: tuple[int, int]

    def common(self, ids: Sequence[int]) -> int:
        pairs = enumerate(zip(self.ids, ids, strict=False))
        return next((place for place, (mine, other) in pairs if mine != other), min(len(self.ids), len(ids)))


class EndedTurns:
    """Ended turns by the id of their request, oldest first; at most `most` tokens of them."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens = most, 0
        self.turns: dict[Hashable, EndedTurn] = {}
        self._by_prompt: dict[tuple[int, int], list[Hashable]] = {}
        self._lengths: Counter[int] = Counter()

    def add(self, id: Hashable, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[Hashable]:
        """Remember a turn; gives those that are too many now."""
        turn = EndedTurn([*prompt_ids, *response_ids], (len(prompt_ids), _hash(prompt_ids)))
        self.turns[id], self.tokens = turn, self.tokens + len(turn.ids)
        self._by_prompt.setdefault(turn.prompt, []).append(id)
        self._lengths[len(prompt_ids)] += 1
        dropped = []
        while self.tokens > self.most:
            dropped.append(next(iter(self.turns)))
            self._remove(dropped[-1])
        return dropped

    def take(self, prompt_ids: Sequence[int]) -> Hashable | None:
        """The turn that this prompt continues, which is forgotten: its blocks become the request's own."""
        # Only a turn whose whole prompt comes back. One that has a mere beginning in common, such as a system prompt,
        # belongs to another conversation, which will need it.
        found = [
            (self.turns[id].common(prompt_ids), id)
            for prompt in self._beginnings(prompt_ids)
            for id in self._by_prompt.get(prompt, ())
        ]
        found = [(common, id) for common, id in found if common >= self.turns[id].prompt[0]]
        if not found:
            return None
        _, id = max(found, key=lambda one: one[0])
        self._remove(id)
        return id

    def _beginnings(self, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Length and hash of each beginning that is as long as the prompt of a turn."""
        value = 0
        for length, id in enumerate(ids, 1):
            value = (value * _BASE + id + 1) % _PRIME
            if length in self._lengths:
                yield length, value

    def _remove(self, id: Hashable) -> None:
        turn = self.turns.pop(id)
        self.tokens -= len(turn.ids)
        self._by_prompt[turn.prompt].remove(id)
        if not self._by_prompt[turn.prompt]:
            del self._by_prompt[turn.prompt]
        self._lengths[turn.prompt[0]] -= 1
        if not self._lengths[turn.prompt[0]]:
            del self._lengths[turn.prompt[0]]


def _hash(ids: Sequence[int]) -> int:
    value = 0
    for id in ids:
        value = (value * _BASE + id + 1) % _PRIME
    return value


class KeepingServer(Server):
    """A server whose requests continue from the KV cache of the turn before. Half of the cache may be kept: what runs
    needs the rest, and an engine that needs more evicts what is kept."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.ended = EndedTurns(engine.cache_tokens() // 2)

    async def generate(self, request: Request, on_progress: Callable[[Output], None] | None = None) -> Output:
        request = replace(request, parent=self.ended.take(request.prompt_ids), keep=True)
        output = await super().generate(request, on_progress)
        for id in self.ended.add(request.id, request.prompt_ids, output.token_ids):
            self.release(id)
        return output


def open_server(engine: RolloutEngine) -> Server:
    """One that keeps turns, unless the engine finds them by itself or keeps none."""
    return KeepingServer(engine) if engine.cache_tokens() else Server(engine)


UNLIMITED = 32768
"""Tokens of a sequence where neither the model nor the user sets a limit."""


def serve(name: str, settings: Settings, options: argparse.Namespace, api_key: str | None) -> int:
    """Serves until the process is interrupted."""
    check_installed(settings.config.actor_rollout_ref.rollout.name)
    with explain_out_of_memory(settings.config.actor_rollout_ref.rollout, settings.config.data.max_response_length):
        loaded = load(name, settings, options)
        made = _for_a_run(loaded, api_key) if options.accept_weights else _by_apis(loaded, settings, options, api_key)
    asyncio.run(_run(*made, options))
    return 0


@dataclass
class Loaded:
    """A model and the engine that generates with it."""

    name: str
    engine_name: str
    device: torch.device
    longest: int
    tokenizer: Any
    module: torch.nn.Module
    engine: RolloutEngine
    description: dict[str, Any]


def load(name: str, settings: Settings, options: argparse.Namespace) -> Loaded:
    """The model and its engine."""
    config, rollout = settings.config, settings.config.actor_rollout_ref.rollout
    source = find_model(name, settings, say)
    tokenizer, device = load_tokenizer_of(source, raw=False), pick_device(config.trainer.device)
    positions = read_positions(source)
    longest = options.max_model_len or positions or UNLIMITED
    config.data.max_response_length, config.data.max_prompt_length = longest // 2, longest - longest // 2
    plan_cache(settings, source.config, device, rollout.max_num_seqs, say)
    module = load_module(source, device).requires_grad_(False)
    if note := check_positions(positions_of(module), longest):
        say(f"note: {note}")
    if options.accept_weights and source.config.lora_rank > 0 and can_take_adapters(rollout.name):
        module = with_adapters(module, source.config).requires_grad_(False)
    description = describe(module, model=source.name, longest=longest) if options.accept_weights else {}
    engine, engine_name = build_engine(rollout, module, tokenizer, device=device, longest=longest)
    engine.wake()
    return Loaded(source.name, engine_name, device, longest, tokenizer, module, engine, description)


Made = tuple[AbstractAsyncContextManager[web.Application], str]
"""An application, and the end of the sentence on what it does."""


def _by_apis(loaded: Loaded, settings: Settings, options: argparse.Namespace, api_key: str | None) -> Made:
    """The model behind OpenAI's and Anthropic's APIs."""
    template = MessageTemplate(loaded.tokenizer, settings.config.data.apply_chat_template_kwargs)
    call_format, no_tools = find_format(template, settings.turns.format, say)
    about = f"{loaded.name} on {loaded.device}, engine {loaded.engine_name}; {loaded.longest} tokens"
    say(f"{about}; tool calls: {no_tools or call_format}")
    model = ServedModel(
        options.served_name or options.model,
        template,
        FORMATS[call_format],
        make_sampling(settings, end_token_ids(loaded.tokenizer, model_end_ids(loaded.module)), max_tokens=1),
        max_model_len=loaded.longest,
        vocabulary=loaded.module.get_input_embeddings().num_embeddings,  # pyright: ignore
        no_tools=no_tools,
    )

    @asynccontextmanager
    async def app() -> AsyncIterator[web.Application]:
        async with open_server(loaded.engine) as server:
            yield make_app(model, LocalChannels(server, api_key))

    return app(), f"/v1 serves `{model.name}`"


def _for_a_run(loaded: Loaded, api_key: str | None) -> Made:
    """The engine for a training run, which pushes its weights."""
    assert api_key is not None
    engine = loaded.engine
    say(f"{loaded.name} on {loaded.device}, engine {loaded.engine_name}; {loaded.longest} tokens")
    about = {**loaded.description, "engine": loaded.engine_name, "takes_adapters": engine.takes_adapters}
    made = make_rollout_app(EngineHost(engine, about), api_key)
    return nullcontext(made), " generates for a run with actor_rollout_ref.rollout.name=server"


async def _run(made: AbstractAsyncContextManager[web.Application], what: str, options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with made as app:
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, options.host, options.port)
            try:
                await site.start()
            except OSError as error:
                raise UserError(
                    f"--port {options.port}: cannot listen on {options.host}: {error.strerror or error}.\n"
                    "  to do:  give another --port (0 takes any that is free)"
                ) from None
            host, port = runner.addresses[0][:2]
            say(f"http://{host}:{port}{what}; Ctrl-C ends it.")
            await stopped.wait()
        finally:
            await runner.cleanup()
