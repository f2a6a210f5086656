"""Loads what `posttrain serve` serves, and runs its server.

The KV cache of ended requests is kept for the request that continues their conversation. Clients of chat APIs send the
whole conversation with every turn and do not say which request they continue: it is found by its tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from aiohttp import web

from posttrain import cores
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
from posttrain.conversations.serving.model import ServedModel
from posttrain.conversations.serving.process import ServerProcess, listen, url_of
from posttrain.conversations.serving.remote import RemoteServer, ServerHost
from posttrain.conversations.serving.sessions import LocalChannels
from posttrain.conversations.serving.wire import Link, Receive
from posttrain.conversations.templates import MessageTemplate
from posttrain.engine.ranks import join_ranks, team_of
from posttrain.errors import UserError
from posttrain.kernels.tensor_parallel import Team
from posttrain.models.loading import check_positions, end_token_ids, model_end_ids, positions_of
from posttrain.models.lora import with_adapters
from posttrain.rollout.base import Output, Request, RolloutEngine
from posttrain.rollout.engines import build_engine, can_take_adapters
from posttrain.rollout.outside import check_installed
from posttrain.rollout.server.engine import describe
from posttrain.rollout.server.host import EngineHost
from posttrain.rollout.server.host import make_app as make_rollout_app
from posttrain.rollout.server.ranks import Follower, MirroredEngine, RankError, follow
from posttrain.texts import common_start
from posttrain.tracking.console import print_text
from posttrain.workers.roles import pick_device

_BASE, _PRIME = 1_000_003, 2**61 - 1


@dataclass(frozen=True)
class EndedTurn:
    """A prompt with its response, and the prompt's length and hash."""

    ids: list[int]
    prompt: tuple[int, int]


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
            (common_start(self.turns[id].ids, prompt_ids), id)
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


class KeepingServer:
    """A server whose requests continue from the KV cache of the turn before. At most `most` tokens are kept."""

    def __init__(self, server: Server | RemoteServer, most: int) -> None:
        self.server, self.ended = server, EndedTurns(most)

    async def generate(self, request: Request, on_progress: Callable[[Output], None] | None = None) -> Output:
        request = replace(request, parent=self.ended.take(request.prompt_ids), keep=True)
        output = await self.server.generate(request, on_progress)
        for id in self.ended.add(request.id, request.prompt_ids, output.token_ids):
            self.server.release(id)
        return output


def keep_turns(server: Server | RemoteServer, cache_tokens: int) -> Server | RemoteServer | KeepingServer:
    """A server that keeps turns, unless its engine finds them by itself or keeps none. Half of the cache may be kept:
    what runs needs the rest, and an engine that needs more evicts what is kept."""
    return KeepingServer(server, cache_tokens // 2) if cache_tokens else server


PLANNED = ("kv_cache_gb", "gpu_memory_utilization")
UNLIMITED = 32768
"""Tokens of a sequence where neither the model nor the user sets a limit."""


def serve(name: str, settings: Settings, options: argparse.Namespace, api_key: str | None, args: Sequence[str]) -> int:
    """Serves until the process is interrupted. `args` are those of the command."""
    rollout = settings.config.actor_rollout_ref.rollout
    check_installed(rollout.name)
    if (own := part_of_this_process()) is not None:
        part, connection = own
        follow(connection, lambda: build(load(name, settings, options, part), settings, part))
    if rollout.engine_size > 1:
        assert api_key is not None
        return _serve_by_ranks(name, settings, options, api_key, args)
    with explain_out_of_memory(rollout, settings.config.data.max_response_length):
        loaded = load(name, settings, options)
        # Before the engine: what it starts must not be in the process that speaks HTTP.
        served = None if options.accept_weights else ApiServer(loaded, settings, options, api_key)
        engine = build(loaded, settings)
    if served is not None:
        asyncio.run(served.run(engine))
    else:
        assert api_key is not None
        asyncio.run(_serve_a_run(loaded, engine, options, api_key, Losses()))
    return 0


def _serve_by_ranks(
    name: str, settings: Settings, options: argparse.Namespace, api_key: str, args: Sequence[str]
) -> int:
    """The same with an engine that this process, rank 0, holds together with others."""
    rollout, lost = settings.config.actor_rollout_ref.rollout, Losses()
    size = rollout.engine_size
    device = Part(0, size).device(pick_device(settings.config.trainer.device))
    plan_cache(settings, find_model(name, settings, say).config, device, rollout.max_num_seqs, say, size)
    part = Part(0, size, free_address(), {key: getattr(rollout, key) for key in PLANNED})
    followers = start_ranks(args, part, lost)
    try:
        with explain_out_of_memory(rollout, settings.config.data.max_response_length):
            loaded = load(name, settings, options, part)
            engine = MirroredEngine(build(loaded, settings, part), followers, lost)
            for follower in followers:
                if error := follower.reply().error:
                    raise RankError(f"{follower.name} did not start: {error}")
    except Exception as error:
        # What went wrong in another process says more than the error of a call that waited for it.
        raise next((RankError(one.problem) for one in followers if one.has_ended()), error) from None
    problem = asyncio.run(_serve_a_run(loaded, engine, options, api_key, lost))
    if problem is None and not engine.has_work():
        engine.close()
    leave(problem or "", 2 if problem else 0)
    return 0


@dataclass
class Loaded:
    """A model."""

    name: str
    device: torch.device
    longest: int
    tokenizer: Any
    module: torch.nn.Module
    description: dict[str, Any]


# The processes of `posttrain serve --accept-weights` whose engine is held by several: one for each device. The server
# is rank 0. It starts the others as the same command with the variable POSTTRAIN_SERVE_PART, so that each loads the
# model and makes its part of the engine; they make the calls that it forwards (`rollout/server/ranks.py`).
VARIABLE = "POSTTRAIN_SERVE_PART"


@dataclass(frozen=True)
class Part:
    """Which process this is, among how many that hold the engine together."""

    rank: int = 0
    ranks: int = 1
    address: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    """What the first has planned for the cache: all must have as many blocks of it."""

    def device(self, device: torch.device) -> torch.device:
        """This process's own, of the kind of `device`."""
        if self.ranks == 1 or device.type != "cuda":
            return device
        if (there := torch.cuda.device_count()) < self.ranks:
            raise UserError(f"tensor_model_parallel_size={self.ranks}: this machine has {there} GPUs; set it to fewer")
        return torch.device("cuda", self.rank)

    def join(self, device: torch.device) -> Team | None:
        """Meets the other processes."""
        if self.ranks == 1:
            return None
        if device.type == "cpu":
            torch.set_num_threads(max(1, cores.usable() // self.ranks))
        join_ranks(self.rank, self.ranks, self.address, device)
        return team_of(self.ranks, device)


ALONE = Part()


class Losses:
    """Is called, in any thread, when a process of the engine is lost: ends this process until `tell` is replaced."""

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = leave

    def __call__(self, problem: str) -> None:
        self.tell(problem)


def leave(problem: str = "", status: int = 2) -> None:
    """Ends this process at once: its engine may wait for a process that is gone, and threads that wait are joined at an
    ordinary exit."""
    if problem:
        print_text(f"{problem}\n  to do:  look at the output above, and start the server again", sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_ranks(args: Sequence[str], part: Part, lost: Callable[[str], None]) -> list[Follower]:
    """All processes but this one; `args` are those of the command."""
    followers = []
    for rank in range(1, part.ranks):
        mine, theirs = Pipe()
        own = json.dumps({"fd": theirs.fileno(), "part": asdict(part) | {"rank": rank}})
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", "serve", *args],
            env={**os.environ, VARIABLE: own},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the first, which ends the others
        )
        theirs.close()
        followers.append(Follower(rank, mine, lost, process))
    return followers


def part_of_this_process() -> tuple[Part, Connection] | None:
    """Of a process that `start_ranks` has started: its part, and its connection to the first."""
    words = os.environ.pop(VARIABLE, None)
    if words is None:
        return None
    given = json.loads(words)
    return Part(**given["part"]), Connection(given["fd"])


def load(name: str, settings: Settings, options: argparse.Namespace, part: Part = ALONE) -> Loaded:
    """The model; in host memory where several processes hold the engine, each of which copies its part from there."""
    config, rollout = settings.config, settings.config.actor_rollout_ref.rollout
    note = say if part.rank == 0 else lambda text: None
    source = find_model(name, settings, note)
    tokenizer, device = load_tokenizer_of(source, raw=False), part.device(pick_device(config.trainer.device))
    positions = read_positions(source)
    longest = options.max_model_len or positions or UNLIMITED
    config.data.max_response_length, config.data.max_prompt_length = longest // 2, longest - longest // 2
    if part.ranks == 1:
        plan_cache(settings, source.config, device, rollout.max_num_seqs, note)
    for key, value in part.cache.items():
        setattr(rollout, key, value)
    held_on = device if part.ranks == 1 else torch.device("cpu")
    module = load_module(source, device, held_on).requires_grad_(False)
    if problem := check_positions(positions_of(module), longest):
        note(f"note: {problem}")
    if options.accept_weights and source.config.lora_rank > 0 and can_take_adapters(rollout.name, part.ranks):
        module = with_adapters(module, source.config).requires_grad_(False)
    description = describe(module, model=source.name, longest=longest) if options.accept_weights else {}
    return Loaded(source.name, device, longest, tokenizer, module, description)


def build(loaded: Loaded, settings: Settings, part: Part = ALONE) -> RolloutEngine:
    """The engine that generates with a model, or this process's part of it."""
    rollout, team = settings.config.actor_rollout_ref.rollout, part.join(loaded.device)
    engine, name = build_engine(
        rollout, loaded.module, loaded.tokenizer, device=loaded.device, longest=loaded.longest, team=team
    )
    engine.wake()
    loaded.description["engine"] = name
    if part.rank == 0:
        say(f"{loaded.name} on {loaded.device}, engine {name}; {loaded.longest} tokens")
    return engine


class ApiServer:
    """The model behind OpenAI's and Anthropic's APIs: HTTP in a process of its own, the engine in this one."""

    def __init__(self, loaded: Loaded, settings: Settings, options: argparse.Namespace, api_key: str | None) -> None:
        template = MessageTemplate(loaded.tokenizer, settings.config.data.apply_chat_template_kwargs)
        call_format, no_tools = find_format(template, settings.turns.format, say)
        say(f"tool calls: {no_tools or call_format}")
        self.model = ServedModel(
            options.served_name or options.model,
            template,
            FORMATS[call_format],
            make_sampling(settings, end_token_ids(loaded.tokenizer, model_end_ids(loaded.module)), max_tokens=1),
            max_model_len=loaded.longest,
            vocabulary=loaded.module.get_input_embeddings().num_embeddings,  # pyright: ignore
            no_tools=no_tools,
        )
        self.api_key, self.lives = api_key, 0
        self.failure: str | None = None
        self.process = ServerProcess(_listen(options), self._app)

    def _app(self, link: Link, facts: dict[str, Any]) -> tuple[web.Application, Receive]:
        """In the HTTP process."""
        remote = RemoteServer(link)
        server = keep_turns(remote, facts["cache_tokens"])
        return make_app(self.model, LocalChannels(server, self.api_key)), remote.receive

    async def run(self, engine: RolloutEngine) -> None:
        stopped = _until_interrupted()
        try:
            async with Server(engine) as server:
                self._start(server, stopped)
                say(f"{url_of(self.process.listener)}/v1 serves `{self.model.name}`; Ctrl-C ends it.")
                await stopped.wait()
                self.process.close_link()
        finally:
            self.process.close()
        if self.failure is not None:
            raise UserError(f"the HTTP process cannot be started again: {self.failure}.")

    def _start(self, server: Server, stopped: asyncio.Event) -> None:
        host = ServerHost(server, self.lives)

        def lose(how: str) -> None:
            host.end()
            say(f"note: the HTTP process has ended ({how}); its requests are lost, and another one is started.")
            try:
                self._start(server, stopped)
            except RuntimeError as error:
                self.failure = str(error)
                stopped.set()

        self.lives += 1
        host.link = self.process.start({"cache_tokens": server.engine.cache_tokens()}, host.receive, lose)


async def _serve_a_run(
    loaded: Loaded, engine: RolloutEngine, options: argparse.Namespace, api_key: str, lost: Losses
) -> str | None:
    """The engine for a training run, which pushes its weights. The run speaks to it in batches, so that HTTP costs
    little, and is spoken in this process. Returns why it ended, if not by an interrupt."""
    stopped, loop = _until_interrupted(), asyncio.get_running_loop()
    problem: asyncio.Future[str] = loop.create_future()

    def end(text: str) -> None:
        if not problem.done():
            problem.set_result(text)

    def tell(text: str) -> None:  # in any thread
        loop.call_soon_threadsafe(end, text)

    lost.tell = tell
    about = {**loaded.description, "takes_adapters": engine.takes_adapters}
    app = make_rollout_app(EngineHost(engine, about), api_key, problem)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    with _listen(options) as listener:
        try:
            await web.SockSite(runner, listener).start()
            what = "generates for a run with actor_rollout_ref.rollout.name=server"
            say(f"{url_of(listener)} {what}; Ctrl-C ends it.")
            ending = asyncio.ensure_future(stopped.wait())
            await asyncio.wait([ending, problem], return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
        finally:
            await runner.cleanup()  # before the socket is closed, which it looks for
    return problem.result() if problem.done() else None


def _listen(options: argparse.Namespace) -> socket.socket:
    try:
        return listen(options.host, options.port)
    except OSError as error:
        raise UserError(
            f"--port {options.port}: cannot listen on {options.host}: {error.strerror or error}.\n"
            "  to do:  give another --port (0 takes any that is free)"
        ) from None


def _until_interrupted() -> asyncio.Event:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
