"""Loads what `posttrain serve` serves, and runs its server."""

from __future__ import annotations

import argparse
import asyncio
import signal

from aiohttp import web

from posttrain.commands.generation.model import find_model, load_module, load_tokenizer_of, read_positions
from posttrain.commands.generation.session import explain_out_of_memory, make_sampling, plan_cache, say
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
from posttrain.rollout.base import RolloutEngine
from posttrain.rollout.engines import build_engine
from posttrain.rollout.outside import check_installed
from posttrain.workers.roles import pick_device

UNLIMITED = 32768
"""Tokens of a sequence where neither the model nor the user sets a limit."""


def serve(name: str, settings: Settings, options: argparse.Namespace, api_key: str | None) -> int:
    """Serves until the process is interrupted."""
    check_installed(settings.config.actor_rollout_ref.rollout.name)
    with explain_out_of_memory(settings.config.actor_rollout_ref.rollout, settings.config.data.max_response_length):
        model, engine = load(name, settings, options)
    asyncio.run(_run(model, engine, options, api_key))
    return 0


def load(name: str, settings: Settings, options: argparse.Namespace) -> tuple[ServedModel, RolloutEngine]:
    """The model with its template, and its engine."""
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
    engine, engine_name = build_engine(rollout, module, tokenizer, device=device, longest=longest)
    engine.wake()
    template = MessageTemplate(tokenizer, config.data.apply_chat_template_kwargs)
    call_format, no_tools = find_format(template, settings.turns.format, say)
    say(f"{source.name} on {device}, engine {engine_name}; {longest} tokens; tool calls: {no_tools or call_format}")
    served = ServedModel(
        options.served_name or name,
        template,
        FORMATS[call_format],
        make_sampling(settings, end_token_ids(tokenizer, model_end_ids(module)), max_tokens=1),  # a request has its own
        max_model_len=longest,
        vocabulary=module.get_input_embeddings().num_embeddings,  # pyright: ignore
        no_tools=no_tools,
    )
    return served, engine


async def _run(model: ServedModel, engine: RolloutEngine, options: argparse.Namespace, api_key: str | None) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with Server(engine) as server:
        app = make_app(model, LocalChannels(server, api_key))
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
            say(f"http://{host}:{port}/v1 serves `{model.name}`; Ctrl-C ends it.")
            await stopped.wait()
        finally:
            await runner.cleanup()
