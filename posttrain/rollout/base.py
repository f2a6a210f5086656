"""The contract of a rollout engine: requests in, outputs out, one step at a time.

An engine sees token ids only. Batch generation, streaming into rewards and agent loops are written once, above it.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch

Stage = Literal["weights", "cache"]
STAGES: tuple[Stage, ...] = ("weights", "cache")
"""The order in which an engine wakes: with its weights it loads new ones and scores, with its cache it generates."""


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. Log-probs are those of the tempered distribution before any penalty or filter."""

    max_tokens: int
    temperature: float = 1.0
    greedy: bool = False
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    @property
    def filtered(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the tempered distribution itself (or are its most likely ones)."""
        return self.repetition_penalty == 1.0 and (self.greedy or not self.filtered)

    def stopped_by_text(self, tokens: list[int], decode: Callable[[list[int]], str] | None) -> bool:
        """Whether the newest of a response's tokens completed a stop string."""
        if not self.stop or not tokens:
            return False
        assert decode is not None
        # A token is at least one byte, so the last few tokens are enough: decoding the whole response would be slow.
        text = decode(tokens[-(max(len(stop.encode()) for stop in self.stop) + 8) :])
        return any(stop in text for stop in self.stop)


@dataclass(frozen=True)
class Request:
    """A response to generate. With `keep` its KV cache is retained: a later request whose prompt begins with its prompt
    and response names it as `parent`, and computes only the new tokens. Neither changes what is sampled."""

    id: Any  # hashable, of the caller's choice
    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    parent: Hashable | None = None
    keep: bool = False


@dataclass
class Output:
    """A finished (or aborted) response. `versions` are (policy version, number of tokens) spans in order, of the tokens
    that the policy wrote: observation tokens are sampled by no policy and belong to no span."""

    id: Any  # hashable, of the caller's choice
    token_ids: list[int]
    log_probs: Sequence[float] | np.ndarray
    # "stop", "length" or "abort"; "turns", "rows", "tool_time" or "tool_cost" where no further turn was allowed
    finish_reason: str
    versions: list[tuple[int, int]] = field(default_factory=list)
    sampling_log_probs: Sequence[float] | None = None
    """Log-probs in the distribution that was sampled from, after penalties and filters; None where `log_probs` are."""
    written: Sequence[bool] | None = None
    """Which tokens the policy wrote; the others are observation tokens between its turns. None: it wrote all."""
    routes: np.ndarray | None = None
    """(tokens, layers, top_k): the experts of the first tokens of prompt and response in a mixture, where they are
    recorded. The last token that was sampled has none: it was never computed."""


def digest(outputs: Iterable[Output], before: int = 0) -> int:
    """A checksum of ids, tokens and bits of log-probs, by which ranks that hold an engine together compare what they
    have sampled; with `before` also of all earlier outputs."""
    for output in outputs:
        made = np.asarray(output.token_ids, np.int64), np.asarray(output.log_probs, np.float32)
        said = f"{output.id} {output.finish_reason}".encode()
        before = zlib.crc32(b"".join((said, *(array.tobytes() for array in made))), before)
    return before


@dataclass
class Row:
    """A request under way, with what has been made of it, for engines that look at every token."""

    request: Request
    name: str = ""
    """Of the request in another package's engine."""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def add(self, token: int, log_prob: float, version: int) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def stopped_by_text(self, decode: Callable[[list[int]], str] | None) -> bool:
        return self.request.sampling.stopped_by_text(self.tokens, decode)


class RolloutEngine(ABC):
    """What every engine implements; `native`, `hf`, `vllm`, `sglang` and `server` are built in."""

    version: int = 0
    shares_weights: bool = False
    """Whether the engine reads the trainer's own weights, so that a weight sync copies nothing."""

    takes_adapters: bool = False
    """Whether the engine holds LoRA adapters beside their base, so that a weight sync brings the adapters alone, under
    their names in an adapter file."""

    updates_in_flight: bool = False
    """Whether `load_weights` may come between two steps while responses are under way: these continue, and their
    `versions` say which tokens are of the old weights, and which of the new."""

    rounding: torch.dtype | None = None
    """The type that its log-probs are rounded as, where that is not the model's own."""

    ranks: int = 1
    """Processes that hold the engine together. Each gets all requests; all get the same calls in the same order."""

    decode: Callable[[list[int]], str] | None = None
    """Turns token ids into text, for stop strings; without it these are rejected."""

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request."""

    def check_request(self, request: Request) -> None:
        """For engines: reject a request that cannot be generated, or that comes while the cache is asleep."""
        if request.sampling.stop and self.decode is None:
            raise ValueError("stop strings need an engine that was given `decode`")
        if request.sampling.max_tokens < 1 or not request.prompt_ids:
            raise ValueError(f"request {request.id}: needs a prompt and room for at least one token")
        self.check_awake("cache")

    @abstractmethod
    def step(self) -> list[Output]:
        """Advance every running request by at least one token; returns those that finished."""

    def advance(self) -> list[Output]:
        """As `step`; an engine that is far away does several at once, until a request has ended or for a moment."""
        return self.step()

    @abstractmethod
    def has_work(self) -> bool:
        """Whether requests are queued or running."""

    def ahead_s(self) -> float:
        """For how many seconds the device has work from earlier steps: requests that come until then are admitted as
        early as those that are here already. 0 or less if the next step should begin now."""
        return 0.0

    def running_tokens(self) -> int:
        """Tokens of the responses under way, for progress displays; 0 if the engine does not count them."""
        return 0

    def take_counts(self) -> dict[str, float]:
        """What `speculation_metrics` (`native/speculation.py`) reads, since the last call. It is called with
        `rollout.speculation` only, and other names are not logged."""
        return {}

    def so_far(self, ids: Collection[Hashable]) -> list[Output]:
        """What these running requests have, for streaming; an engine that cannot say it gives nothing."""
        return []

    @abstractmethod
    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        """Stop these requests; returns what they have so far, with finish reason `abort`."""

    @abstractmethod
    def release(self, ids: Iterable[Hashable]) -> None:
        """Free what these ended requests retained: no request will name them as parent."""

    @abstractmethod
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probs of each sequence's tokens after its first, as the engine itself computes them."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load new weights under their Hugging Face names; outputs carry `version` from now on. Works without a cache,
        as `score` does."""

    # -- memory ---------------------------------------------------------------------------------------------------
    asleep: frozenset[Stage] = frozenset()
    """What `sleep` has freed and `wake` has not restored."""

    @abstractmethod
    def cache_bytes(self) -> int:
        """Bytes that the cache holds now."""

    def cache_tokens(self) -> int:
        """Tokens that the cache holds at most, where callers decide by `keep` what of it is retained; 0 otherwise."""
        return 0

    @abstractmethod
    def _give_back(self) -> None:
        """Free what only generation needs; there are no requests."""

    @abstractmethod
    def _take(self, stage: Stage) -> None:
        """Restore what a stage needs, now or when it is first used."""

    def let_go(self) -> None:
        """Hold no references to the old place of the weights: they may have been moved."""
        return

    def sleep(self) -> None:
        """Free the memory that only generation needs; no request may be running or waiting."""
        if self.has_work():
            raise RuntimeError("the engine still has requests; abort them before sleep")
        self._give_back()
        self.asleep = frozenset(STAGES)

    def wake(self, *stages: Stage) -> None:
        """Be ready again: all at once, or `weights` before a sync and `cache` after it. Memory that only the sync needs
        is free again before the cache is allocated, so that the two are never needed together."""
        wanted: list[Stage] = [stage for stage in STAGES if stage in self.asleep and stage in (stages or STAGES)]
        if "cache" in wanted and "weights" in self.asleep - set(wanted):
            raise RuntimeError("the weights are asleep: they wake, and are synced, before the cache")
        for stage in wanted:
            self._take(stage)
        self.asleep -= set(wanted)

    def check_awake(self, stage: Stage) -> None:
        """For engines: requests require the cache; new weights and scores require the weights."""
        if stage in self.asleep:
            raise RuntimeError(f"the engine is asleep: wake({stage!r}) comes first")


class WrappedEngine(cast("Any", RolloutEngine)):  # a checker would miss the methods, which are set below
    """Has the engine `inner` do the work; a subclass overrides what differs. `step` is what `advance` calls.

    Example:
        class Counted(WrappedEngine):
            requests = 0

            def submit(self, request):
                self.requests += 1
                self.inner.submit(request)
    """

    def __init__(self, inner: RolloutEngine) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:  # what the contract does not name
        return getattr(self.inner, name)


def _of_inner(name: str) -> property:
    return property(lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value))


for _name in [name for name in vars(RolloutEngine) if not name.startswith("_") and name != "advance"]:
    setattr(WrappedEngine, _name, _of_inner(_name))
WrappedEngine.__abstractmethods__ = frozenset()
