"""The `vllm` engine: vLLM's scheduler, cache and kernels, with weights that a sync copies into it.

Requests and outputs go through vLLM's `LLMEngine` in this process. Log-probs are vLLM's `processed_logprobs`, those of
what was sampled from: without filters and penalties they are log-softmax(logits / temperature). With them a response's
log-probs before filters are computed in one more pass over it when it has ended; its logits are then divided by the
temperature before vLLM sees them, which scores take as well, so that requests of another scale wait for their end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from posttrain.rollout.base import Output, Request, Row, Sampling, Stage
from posttrain.rollout.outside import CopyEngine, Weights
from posttrain.rollout.vllm.adapters import HeldAdapters
from posttrain.rollout.vllm.inside import Inside, close


@dataclass
class _Row(Row):
    drawn: list[float] | None = None
    reason: str | None = None
    """Why it has ended; it is then under way only to be scored."""

    @property
    def scale(self) -> float:
        """What its logits are divided by before vLLM sees them."""
        sampling = self.request.sampling
        return 1.0 if sampling.plain or sampling.greedy else sampling.temperature

    def scored(self, log_probs: Sequence[float]) -> None:
        """The model's own log-probs have come; what was drawn from is known already. Greedy rows draw from nothing."""
        self.drawn = [*log_probs] if self.request.sampling.greedy else self.log_probs
        self.log_probs = [*log_probs]

    def output(self, reason: str) -> Output:
        log_probs, drawn = self.log_probs, self.drawn
        if drawn is None and not self.request.sampling.plain:  # it was aborted, and nobody has scored it yet
            log_probs, drawn = [float("nan")] * len(self.tokens), self.log_probs
        return Output(self.request.id, self.tokens, log_probs, reason, self.versions, drawn)


class VLLMEngine(CopyEngine):
    """Decodes with `llm`, a vLLM LLMEngine of this process. `tied` names heads by their embeddings. With `keep_groups`
    torch's process group outlives the engine. `adapters` are computed beside the base: a sync brings them alone."""

    title = "vLLM"

    def __init__(
        self,
        llm: Any,
        *,
        decode: Callable[[list[int]], str] | None = None,
        source: Callable[[], Weights] | None = None,
        tied: Mapping[str, str] | None = None,
        keep_groups: bool = False,
        adapters: HeldAdapters | None = None,
        ranks: int = 1,
    ) -> None:
        super().__init__(decode, source)
        self.ranks = ranks
        self.llm, self.inside = llm, Inside(llm)
        self.tied, self.keep_groups = tied or {}, keep_groups
        self.adapters, self.takes_adapters = adapters, adapters is not None
        self.longest: int = llm.vllm_config.model_config.max_model_len - 1  # a row that is scored gets a token more

    @property
    def on_cuda(self) -> bool:
        return self.inside.on_cuda

    # -- requests -------------------------------------------------------------------------------------------------
    def _new_row(self, request: Request) -> _Row:
        return _Row(request, self._new_name())

    def _new_name(self) -> str:
        self.count += 1
        return str(self.count)

    def _take_out(self, rows: Sequence[_Row]) -> None:
        self.llm.abort_request([row.name for row in rows])
        for row in rows:
            del self.rows[row.name]

    # -- a step ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self) -> list[Output]:
        self._be_ready()
        self._let_in()
        news = [(self.rows[made.request_id], made) for made in self.llm.step() if made.request_id in self.rows]
        return [row.output(str(row.reason)) for row, made in news if self._has_ended(row, made)]

    def _let_in(self) -> None:
        """In the order in which they came; a scale of logits is that of all who run."""
        while self.waiting:
            row = self.waiting[0]
            if row.scale != self.inside.scale:
                if self.rows:
                    return
                self.inside.divide_logits(row.scale)
            self._ask(self.waiting.popleft())

    def _ask(self, row: _Row) -> None:
        sampling = row.request.sampling
        settings: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature / row.scale,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": [*sampling.stop_token_ids],
            "seed": row.request.seed & (2**63 - 1),
            "logprobs": 0,
        }
        self._add(row, [*row.request.prompt_ids], settings, every_step=True)

    def _add(self, row: _Row, ids: list[int], settings: dict[str, Any], *, every_step: bool = False) -> None:
        from vllm import SamplingParams  # pyright: ignore
        from vllm.inputs.engine import tokens_input  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore

        kind = RequestOutputKind.DELTA if every_step else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(**settings, ignore_eos=True, detokenize=False, output_kind=kind)
        adapters = {} if self.adapters is None else {"lora_request": self.adapters.request()}
        self.llm.add_request(row.name, tokens_input(ids), params, **adapters)
        self.rows[row.name] = row

    def _has_ended(self, row: _Row, made: Any) -> bool:
        """Add what vLLM made of a row; true if it has ended, and been scored where that is needed."""
        if row.reason is not None:
            row.scored(_scores(made)[-len(row.tokens) :])
            del self.rows[row.name]
            return True
        new = made.outputs[0]
        for token, choices in zip(new.token_ids, new.logprobs, strict=True):
            row.add(token, choices[token].logprob, self.version)
        reason = new.finish_reason
        if reason not in (None, "stop", "length"):
            raise RuntimeError(f"vLLM ended request {row.request.id} with {reason!r}")
        if reason != "stop" and row.stopped_by_text(self.decode):
            if reason is None:
                self.llm.abort_request([row.name])
            reason = "stop"
        if reason is None:
            return False
        del self.rows[row.name]
        row.reason = reason
        if row.request.sampling.plain:
            return True
        row.name = self._new_name()
        self._add(row, [*row.request.prompt_ids, *row.tokens], _SCORING)
        return False

    # -- weights and memory ---------------------------------------------------------------------------------------
    def _scored(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
        self.inside.divide_logits(temperature)
        try:
            return self._of_prompts(token_ids)
        finally:
            self.inside.divide_logits(1.0)
            self.llm.reset_prefix_cache()

    def _of_prompts(self, token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        found: dict[str, list[float]] = {}
        names = [self._new_name() for _ in token_ids]
        for name, row in zip(names, token_ids, strict=True):
            if len(row) > 1:
                self._add(_Row(Request(name, row, _NOTHING, 0), name), [*row], _SCORING)
        try:
            while self.rows:
                for made in self.llm.step():
                    found[made.request_id] = _scores(made)
                    del self.rows[made.request_id]
        except BaseException:
            self.abort(list(self.rows))
            raise
        return [torch.tensor(found.get(name, []), dtype=torch.float32) for name in names]

    def load_weights(self, weights: Weights, version: int) -> None:
        self.check_awake("weights")
        if any(not row.request.sampling.plain for row in self.rows.values()):
            raise RuntimeError(
                "requests with filters or penalties are scored at their end: weights cannot change before"
            )
        if self.adapters is not None and self.empty:  # a sync does not bring the base, which was given back
            assert self.source is not None
            weights = chain(self.source(), weights)
        self._load(weights)
        self.version = version
        self._forget()

    def _load(self, weights: Weights) -> None:
        self.inside.load(self._with_tied(weights if self.adapters is None else self.adapters.take_from(weights)))
        self.empty = False

    def _finish_loading(self) -> None:
        self.inside.finish_loading()
        if self.adapters is not None:
            self.adapters.renew()

    def _with_tied(self, weights: Weights) -> Weights:
        """Syncs send a tied weight once. vLLM's CPU build keeps a copy of the head in an order of its own, which only a
        weight of the head's name renews."""
        missing: dict[str, torch.Tensor] = {}
        for name, weight in weights:
            missing.pop(name, None)
            if name in self.tied:
                missing[self.tied[name]] = weight
            yield name, weight
        yield from missing.items()

    def _forget(self) -> None:
        """What the cache holds of older weights; rows that run are computed anew."""
        if self.rows:
            self._finish_loading()
            self.llm.reset_prefix_cache(reset_running_requests=True)
        else:
            self.llm.reset_prefix_cache()

    def _be_ready(self) -> None:
        """The weights are whole, and where they should be."""
        super()._be_ready()
        self._finish_loading()

    def cache_bytes(self) -> int:
        return 0 if "cache" in self.asleep else self.inside.cache_bytes()

    def _give_back(self) -> None:
        self._finish_loading()
        self.llm.reset_prefix_cache()
        super()._give_back()

    def _drop(self, stage: Stage) -> None:
        self.inside.drop(stage, keep=stage == "weights" and self.source is None)

    def _resume(self, stage: Stage) -> None:
        self.inside.take(stage)
        if stage == "weights" and self.adapters is not None and self.on_cuda:
            self.adapters.forget()

    def close(self) -> None:
        """Its memory is free."""
        close(self.llm, keep_groups=self.keep_groups)
        if self.adapters is not None:
            self.adapters.close()


_NOTHING = Sampling(max_tokens=1)
_SCORING: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}


def _scores(made: Any) -> list[float]:
    """Of a row's tokens after the first."""
    ids = made.prompt_token_ids
    return [choices[token].logprob for token, choices in zip(ids[1:], made.prompt_logprobs[1:], strict=True)]
