"""The near side: a rollout engine over one or several servers, each with a whole engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import torch

from posttrain.models.proof import beyond_rounding
from posttrain.rollout.base import Output, Request, RolloutEngine, Stage
from posttrain.rollout.server.link import Link, ServerError
from posttrain.rollout.server.wire import VERSION, read_output, write_bucket, write_request
from posttrain.rollout.weight_buckets import split_into_buckets


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
