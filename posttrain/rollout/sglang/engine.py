"""The `sglang` engine: SGLang's scheduler, cache and kernels in a process beside this one, with weights that a sync
copies into it.

SGLang generates ahead and reports every token; a step takes one of every row. Tokens that no step has taken when a row
ends or is aborted are discarded. Rows are sampled by posttrain's own sampler in SGLang's process (`inside.py`), from
their seeds and positions alone, so that a row may be taken out and continue later, with other weights, where it was.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from posttrain.rollout.base import Output, Request, Row, Sampling, Stage
from posttrain.rollout.outside import CopyEngine, Weights
from posttrain.rollout.sglang.inside import DRAWN, DROP, TAKE, sampler_params
from posttrain.rollout.sglang.link import Link

TAGS: dict[Stage, str] = {"weights": "weights", "cache": "kv_cache"}
"""Our stages -> the names of SGLang's memory on a GPU."""
TOGETHER = 2**30  # bytes of weights that are handed over at once
PATIENCE = 60.0  # seconds in which SGLang must have ended what was aborted
_NOTHING = Sampling(max_tokens=1, greedy=True)


@dataclass
class _Row(Row):
    drawn: list[float] = field(default_factory=list)
    news: deque[tuple[int, float, float]] = field(default_factory=deque)
    """Tokens that SGLang has made and no step has taken."""
    reason: str | None = None
    """Why SGLang has ended it; None while it may generate more than `news`."""

    @property
    def settings(self) -> dict[str, Any]:
        sampling, seed = self.request.sampling, self.request.seed & (2**64 - 1)
        return {
            "max_new_tokens": sampling.max_tokens - len(self.tokens),
            "stop_token_ids": [*sampling.stop_token_ids],
            "custom_params": sampler_params(sampling, seed, len(self.tokens)),
        }

    def receive(self, chunk: dict[str, Any]) -> None:
        """Add the tokens that SGLang reports."""
        more = chunk["meta_info"]
        log_probs = [one[0] for one in more["output_token_logprobs"]]
        self.news.extend(zip(chunk["output_ids"], log_probs, more[DRAWN], strict=True))
        if more["finish_reason"] is not None:
            self.reason = more["finish_reason"]["type"]

    def output(self, reason: str) -> Output:
        drawn = None if self.request.sampling.plain else self.drawn
        return Output(self.request.id, self.tokens, self.log_probs, reason, self.versions, drawn)


class SGLangEngine(CopyEngine):
    """Decodes with SGLang over a `link`. Its cache holds `held` bytes."""

    title = "SGLang"

    def __init__(
        self,
        link: Link,
        *,
        longest: int,
        max_num_seqs: int,
        held: int,
        on_cuda: bool,
        decode: Callable[[list[int]], str] | None = None,
        source: Callable[[], Weights] | None = None,
    ) -> None:
        self.link, self.longest, self.max_num_seqs, self.held, self.on_cuda = link, longest, max_num_seqs, held, on_cuda
        super().__init__(decode, source)
        self.readers: dict[str, asyncio.Task[None]] = {}

    # -- requests -------------------------------------------------------------------------------------------------
    def _new_row(self, request: Request) -> _Row:
        return _Row(request)

    def _take_out(self, rows: Sequence[_Row]) -> None:
        if rows:
            self.link.run(self._stopped(rows))
        for row in rows:
            del self.rows[row.name]
            row.news.clear()
            row.reason = None

    async def _stopped(self, rows: Sequence[_Row]) -> None:
        for row in rows:
            if row.reason is None:
                self.link.engine.tokenizer_manager.abort_request(rid=row.name)
        await asyncio.gather(*(self.readers.pop(row.name) for row in rows), return_exceptions=True)

    # -- a step ---------------------------------------------------------------------------------------------------
    def step(self) -> list[Output]:
        self._be_ready()
        new = [self.waiting.popleft() for _ in range(min(len(self.waiting), self.max_num_seqs - len(self.rows)))]
        for row in new:
            self.count += 1
            row.name = f"{self.count:012d}"  # SGLang aborts every request whose name begins with one
            self.rows[row.name] = row
        if not self.rows:
            return []
        self.link.run(self._wait_for_tokens(new))
        ended = [(row, reason) for row in [*self.rows.values()] if (reason := self._advanced(row)) is not None]
        self._take_out([row for row, _ in ended])
        return [row.output(reason) for row, reason in ended]

    async def _wait_for_tokens(self, new: Sequence[_Row]) -> None:
        """Submit the new rows, and wait until every row has a token that no step has taken."""
        self.readers |= {row.name: asyncio.ensure_future(self._read(row)) for row in new}
        self.lacking = {row.name for row in self.rows.values() if not row.news and row.reason is None}
        self.all_received = asyncio.Event()
        if self.lacking:
            await self.all_received.wait()
        for row in self.rows.values():
            if not row.news:  # it has ended without a token: SGLang failed
                await self.readers[row.name]
                raise RuntimeError(f"SGLang ended request {row.request.id} with {row.reason!r}")

    async def _read(self, row: _Row) -> None:
        ids = [*row.request.prompt_ids, *row.tokens]
        try:
            stream = await self.link.engine.async_generate(
                input_ids=ids, sampling_params=row.settings, rid=row.name, return_logprob=True, stream=True
            )
            async for chunk in stream:
                row.receive(chunk)
                self._note_received(row)
        finally:
            row.reason = row.reason or "error"
            self._note_received(row)

    def _note_received(self, row: _Row) -> None:
        self.lacking.discard(row.name)
        if not self.lacking:
            self.all_received.set()

    def _advanced(self, row: _Row) -> str | None:
        """Take the next token of a row; why it ends with it, if it does."""
        token, log_prob, drawn = row.news.popleft()
        row.add(token, log_prob, self.version)
        row.drawn.append(drawn)
        if row.stopped_by_text(self.decode):
            return "stop"
        if row.news or row.reason is None:
            return None
        if row.reason not in ("stop", "length"):
            raise RuntimeError(f"SGLang ended request {row.request.id} with {row.reason!r}")
        return row.reason

    # -- weights and memory ---------------------------------------------------------------------------------------
    def _scored(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
        rows = [[*row] for row in token_ids if len(row) > 1]
        asked = sampler_params(_NOTHING, 0, 0) | {"scale": float(temperature)}
        ask = {"sampling_params": {"max_new_tokens": 1, "custom_params": asked}, "logprob_start_len": 0}
        found = iter(
            self.link.do(self.link.engine.generate, input_ids=rows, return_logprob=True, **ask) if rows else ()
        )
        return [torch.tensor(_scores(next(found)) if len(row) > 1 else []) for row in token_ids]

    def load_weights(self, weights: Weights, version: int) -> None:
        """Running rows are taken out, and continue from their last token."""
        self.check_awake("weights")
        under_way = [*self.rows.values()]
        self._take_out(under_way)
        self.waiting.extendleft(reversed(under_way))
        self._load(weights)
        self.version = version

    def _load(self, weights: Weights) -> None:
        engine = self.link.engine
        in_session = hasattr(engine, "begin_weight_update")  # newer versions take weights only within one
        if in_session:
            self._taken(engine.begin_weight_update)
        for some in _handed(weights):
            self._taken(engine.update_weights_from_tensor, some, flush_cache=False)
        if in_session:
            self._taken(engine.end_weight_update)
        self.empty = False
        self._forget()

    def _taken(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        done, said = self.link.do(function, *args, **kwargs)
        if not done:
            raise RuntimeError(f"SGLang does not take the weights: {said}")

    def _forget(self) -> None:
        """Drop what the cache holds of older weights. Aborted rows may still be in it, so wait for them."""
        flush = self.link.engine.tokenizer_manager.flush_cache
        if not any(self.link.run(flush(timeout_s=seconds)).success for seconds in (None, PATIENCE)):
            raise RuntimeError("SGLang does not forget what it has computed with older weights")

    def cache_bytes(self) -> int:
        return 0 if "cache" in self.asleep else self.held

    def _drop(self, stage: Stage) -> None:
        if stage == "cache":
            self._forget()
        if self.on_cuda:
            self.link.do(self.link.engine.release_memory_occupation, [TAGS[stage]])
        elif stage == "cache":
            self.link.do(self.link.engine.collective_rpc, DROP)

    def _resume(self, stage: Stage) -> None:
        if self.on_cuda:
            self.link.do(self.link.engine.resume_memory_occupation, [TAGS[stage]])
        elif stage == "cache":
            self.link.do(self.link.engine.collective_rpc, TAKE)

    def close(self) -> None:
        """Free its memory."""
        self.link.close()


def _handed(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Some of the weights at a time. On a GPU SGLang reads them in place; on a CPU it gets copies, since its arguments
    are moved into shared memory."""
    some, size = [], 0
    for name, weight in weights:
        some.append((name, weight.detach() if weight.is_cuda else weight.detach().clone()))
        size += weight.nbytes
        if size >= TOGETHER:
            yield some
            some, size = [], 0
    if some:
        yield some


def _scores(made: dict[str, Any]) -> list[float]:
    """Of a row's tokens after the first."""
    return [one[0] for one in made["meta_info"]["input_token_logprobs"][1:]]
