"""The near side: a rollout engine over one or several servers, each with a whole engine of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import torch

from posttrain.config.rollout import RolloutConfig
from posttrain.errors import UserError
from posttrain.models.forward import without_adapters
from posttrain.models.lora import has_adapters
from posttrain.models.proof import beyond_rounding
from posttrain.rollout.base import Output, Request, RolloutEngine, Stage
from posttrain.rollout.outside import Weights, weights_of
from posttrain.rollout.server.wire import (
    ROOT,
    SESSION,
    VERSION,
    Shapes,
    read_output,
    shapes_of,
    tied_names,
    write_bucket,
    write_request,
)
from posttrain.rollout.vllm.adapters import base_and_adapters
from posttrain.rollout.weight_buckets import split_into_buckets

KEY_VARIABLE = "POSTTRAIN_API_KEY"
IDLE_S = 15.0  # servers and proxies close connections that are idle for long; ours is opened anew before that
START = "posttrain serve MODEL --accept-weights"


class ServerError(UserError):
    """A rollout server cannot be used; says which, and what to do."""


class Link:
    """`call(name, body)` to one server, one at a time. `timeout_s` is how long it may give no sign of life; while it
    computes it gives one every few seconds."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.url, self.key, self.timeout_s = url.rstrip("/"), key, timeout_s
        self.session = ""
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def call(self, name: str, body: Any = None, **headers: str) -> Any:
        """The result; ServerError where there is none. Bytes are sent as they are, anything else as JSON."""
        sent = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        try:
            status, text = self._exchange(f"{ROOT}/{name}", sent, {SESSION: self.session, **headers})
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise self._lost(name, error) from None
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {}
        if status == 200 and "result" in answer:
            return answer["result"]
        self.close()
        raise ServerError(
            self._words(name, status, str(answer.get("error", "")) or text[:200].decode(errors="replace"))
        )

    def _exchange(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        if self._connection is not None and time.monotonic() - self._used > IDLE_S:
            self.close()
        if self._connection is None:
            parts = urlsplit(self.url)
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.netloc, timeout=self.timeout_s)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/octet-stream", **headers}
        self._connection.request("POST", urlsplit(self.url).path + path, body, headers)
        with self._connection.getresponse() as response:
            text = response.read()
        self._used = time.monotonic()
        return response.status, text

    def _lost(self, name: str, error: Exception) -> ServerError:
        reason = f"no sign of life for {self.timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
        reason = reason or type(error).__name__
        if not self.session:
            return ServerError(
                f"No rollout server answers at {self.url}: {reason}.\n"
                f"  to do:  start `{START}` there first, or correct actor_rollout_ref.rollout.server.url"
            )
        return ServerError(
            f"The rollout server {self.url} was lost during `{name}`: {reason}.\n"
            f"  to do:  look at its output, start it again (`{START}`), and repeat this command: the run continues "
            "from its newest checkpoint"
        )

    def _words(self, name: str, status: int, said: str) -> str:
        at = f"The rollout server {self.url}"
        if status == 401:
            return f"{at} rejects the key.\n  to do:  set {KEY_VARIABLE} to the key that it was started with"
        if status == 404:
            return f"{at} is not one for runs.\n  to do:  start it as `{START}`, and give its address without a path"
        if status == 410:
            return f"{at} belongs to another run now: {said}.\n  to do:  give each run servers of its own"
        return f"{at} failed in `{name}`" + (f" (status {status})" if status != 200 else "") + f": {said}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RemoteEngine:
    """One server and the requests that it has, under numbers of this process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.requests: dict[int, Request] = {}  # that run there
        self.numbers: dict[Hashable, int] = {}  # of requests that run, or whose cache is kept
        self.unsent: list[dict[str, Any]] = []
        self.running_tokens = 0
        self._count = count()

    def add(self, request: Request) -> None:
        """Sent with the next step: requests come by the hundred, and a call costs more than they do."""
        number = next(self._count)
        parent = None if request.parent is None else self.numbers.get(request.parent)
        self.unsent.append(write_request(request, number, parent))
        self.requests[number], self.numbers[request.id] = request, number

    def advance(self, *, once: bool) -> list[Output]:
        if not self.requests:
            return []
        unsent, self.unsent = self.unsent, []
        answer = self.link.call("advance", {"submit": unsent, "once": once})
        self.running_tokens = answer["running_tokens"]
        return self._ended(answer["ended"])

    def _ended(self, outputs: list[dict[str, Any]]) -> list[Output]:
        found = []
        for output in outputs:
            request = self.requests.pop(output["id"])
            if not request.keep:
                del self.numbers[request.id]
            found.append(read_output(output, request.id))
        return found

    def abort(self, ids: Collection[Hashable]) -> list[Output]:
        gone = {number: request for number, request in self.requests.items() if request.id in ids}
        waiting = {one["id"] for one in self.unsent if one["id"] in gone}
        self.unsent = [one for one in self.unsent if one["id"] not in waiting]
        sent = [number for number in gone if number not in waiting]
        found = self._ended(self.link.call("abort", {"ids": sent})) if sent else []
        for number in waiting:
            found.append(Output(self.requests.pop(number).id, [], [], "abort"))
        for request in gone.values():
            self.numbers.pop(request.id, None)
        return found

    def release(self, ids: Iterable[Hashable]) -> None:
        numbers = [self.numbers.pop(id) for id in ids if id in self.numbers]
        if numbers:
            self.link.call("release", {"ids": numbers})


class ServerEngine(RolloutEngine):
    """Spreads requests over servers, in turn. Equal prompts that follow each other go to one server, which computes
    them once; a turn goes where the turn before is kept."""

    def __init__(
        self,
        links: Sequence[Link],
        *,
        dtype: torch.dtype = torch.float32,
        decode: Callable[[list[int]], str] | None = None,
        takes_adapters: bool = False,
        tied: Collection[str] = (),
    ) -> None:
        """`dtype` is that of the weights, and `tied` are further names of weights that the servers have under another
        name already."""
        self.servers = [RemoteEngine(link) for link in links]
        self.dtype, self.decode, self.takes_adapters, self.tied = dtype, decode, takes_adapters, frozenset(tied)
        self._threads = ThreadPoolExecutor(len(links), "rollout-server")
        self._next, self._last = 0, None

    def _all(self, work: Callable[[RemoteEngine], Any]) -> list[Any]:
        """The results of all servers, which work at the same time."""
        if len(self.servers) == 1:
            return [work(self.servers[0])]
        return list(self._threads.map(work, self.servers))

    # -- requests -------------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        self.check_request(request)
        holder = next((one for one in self.servers if request.parent in one.numbers), None)
        if holder is None:
            prompt = tuple(request.prompt_ids)
            self._next += prompt != self._last
            self._last = prompt
            holder = self.servers[self._next % len(self.servers)]
        holder.add(request)

    def has_work(self) -> bool:
        return any(server.requests for server in self.servers)

    def running_tokens(self) -> int:
        return sum(server.running_tokens for server in self.servers)

    def step(self) -> list[Output]:
        return [output for part in self._all(lambda server: server.advance(once=True)) for output in part]

    def advance(self) -> list[Output]:
        """The servers step by themselves until a request has ended, or for a moment: one call for many steps."""
        return [output for part in self._all(lambda server: server.advance(once=False)) for output in part]

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        wanted = set(ids)
        return [output for part in self._all(lambda server: server.abort(wanted)) for output in part]

    def release(self, ids: Iterable[Hashable]) -> None:
        wanted = list(ids)
        self._all(lambda server: server.release(wanted))

    # -- weights and memory ---------------------------------------------------------------------------------------
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """All servers score, and must agree: each of them may have lost a weight."""
        self.check_awake("weights")
        body = {"rows": [[int(id) for id in row] for row in token_ids], "temperature": temperature}
        scored = self._all(lambda server: [torch.tensor(row) for row in server.link.call("score", body)])
        for server, theirs in zip(self.servers[1:], scored[1:], strict=True):
            if differ := beyond_rounding(torch.cat(scored[0]), torch.cat(theirs), self.dtype):
                both = f"{self.servers[0].link.url} and {server.link.url}"
                raise ServerError(
                    f"The log-probs of the rollout servers {both} differ {differ}: "
                    "one of them does not compute with the weights it was given"
                )
        return scored[0]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Buckets go to all servers, one after the other: no process holds more than one for it."""
        self.check_awake("weights")
        for bucket in split_into_buckets((name, weight) for name, weight in weights if name not in self.tied):
            body = write_bucket(bucket)
            self._all(lambda server, body=body: server.link.call("load_weights", body, **{VERSION: str(version)}))
        self.version = version

    def cache_bytes(self) -> int:
        return sum(self._all(lambda server: server.link.call("cache_bytes")))

    def _give_back(self) -> None:
        self._all(lambda server: server.link.call("sleep"))

    def _take(self, stage: Stage) -> None:
        self._all(lambda server: server.link.call("wake", {"stages": [stage]}))

    def close(self) -> None:
        """The connections; the servers go on, for another run."""
        for server in self.servers:
            server.link.close()
        self._threads.shutdown()


URL = "actor_rollout_ref.rollout.server.url"


def connect_servers(
    module: torch.nn.Module,
    config: RolloutConfig,
    *,
    decode: Callable[[list[int]], str] | None,
    longest: int | None = None,
) -> tuple[ServerEngine, str]:
    """Connect to all servers and load the model's weights; returns (engine, its name). The servers must have the same
    model, and accept sequences of `longest` tokens."""
    if not config.server.url:
        raise ServerError(f"actor_rollout_ref.rollout.name=server needs the addresses of servers: set {URL}")
    key = os.environ.get(KEY_VARIABLE, "")
    links = [Link(url, key, config.server.timeout_s) for url in config.server.url]
    descriptions = [link.call("open", {"run": f"{socket.gethostname()}, process {os.getpid()}"}) for link in links]
    for link, one in zip(links, descriptions, strict=True):
        link.session = one["session"]
    takes_adapters = has_adapters(module) and all(one["takes_adapters"] for one in descriptions)
    weights = dict(base_and_adapters(module) if takes_adapters else weights_of(module))
    base_weights = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for link, one in zip(links, descriptions, strict=True):
        if problem := _first_difference(shapes_of(base_weights.items()), one["weights"]):
            raise ServerError(
                f"The rollout server {link.url} has another model ({one['model']}): {problem}.\n"
                "  to do:  start it with the model and the dtype of this run, or correct "
                f"{URL}"
            )
        if longest is not None and one["longest"] < longest:
            raise ServerError(
                f"The rollout server {link.url} takes sequences of {one['longest']} tokens, and those of this run may "
                f"have {longest}.\n  to do:  start it with --max-model-len {longest}, or shorten the data's lengths"
            )
    engine = ServerEngine(
        links,
        dtype=next(without_adapters(module).parameters()).dtype,
        decode=decode,
        takes_adapters=takes_adapters,
        tied=_tied_on_both_sides(base_weights, [set(one["tied"]) for one in descriptions]),
    )
    engine.load_weights(weights.items(), 0)
    at = ", ".join(f"{link.url}: {one['engine']}" for link, one in zip(links, descriptions, strict=True))
    return engine, f"server ({at}; {'adapters' if takes_adapters else 'weights'} pushed at every sync)"


def _tied_on_both_sides(base_weights: Mapping[str, torch.Tensor], theirs: list[set[str]]) -> set[str]:
    """Names that need not be sent. A weight that is tied only in the servers would be loaded twice, into one place."""
    ours, tied = set(tied_names(base_weights.items())), theirs[0]
    if any(one != tied for one in theirs) or tied - ours:
        raise ServerError(
            f"rollout servers tie {', '.join(sorted(set().union(*theirs)))} to another weight, and in this model it is "
            "untied (an adapter on the head does that).\n  to do:  leave the head out of model.target_modules"
        )
    return tied


def _first_difference(ours: Shapes, theirs: Shapes) -> str | None:
    """The first difference between two models; None if there is none."""
    for name, (dtype, shape) in ours.items():
        if name not in theirs:
            return f"it has no weight {name}"
        if theirs[name][1] != shape:
            return f"{name} has the shape {theirs[name][1]} there and {shape} here"
        if theirs[name][0] != dtype:
            return f"{name} is {theirs[name][0]} there and {dtype} here (--dtype {dtype})"
    return next((f"it has a weight {name}, and this model none" for name in theirs if name not in ours), None)


def describe(module: torch.nn.Module, *, model: str, longest: int) -> dict[str, Any]:
    """For the server, before its engine is created: the values that `connect_servers` compares."""
    weights: Weights = base_and_adapters(module) if has_adapters(module) else module.state_dict().items()
    base_weights = {name: weight for name, weight in weights if ".lora_" not in name}
    return {
        "model": model,
        "longest": longest,
        "weights": shapes_of(base_weights.items()),
        "tied": tied_names(base_weights.items()),
    }
