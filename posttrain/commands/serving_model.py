"""Loads what `posttrain serve` serves, and runs its server."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web

from posttrain.commands.generation.model import find_model, load_module, load_tokenizer_of, read_positions
from posttrain.commands.generation.session import explain_out_of_memory, make_sampling, plan_cache, say
from posttrain.commands.generation.settings import Settings
from posttrain.commands.serving_turns import open_server
from posttrain.conversations.format_proof import find_format
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.serving.app import make_app
from posttrain.conversations.serving.local import LocalChannels
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.templates import MessageTemplate
from posttrain.errors import UserError
from posttrain.models.loading import check_positions, end_token_ids, model_end_ids, positions_of
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.engines import build_engine, can_take_adapters
from posttrain.rollout.outside import check_installed
from posttrain.rollout.server.build import describe
from posttrain.rollout.server.host import EngineHost
from posttrain.rollout.server.host import make_app as make_rollout_app
from posttrain.workers.roles import pick_device

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
