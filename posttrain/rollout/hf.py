"""The `hf` engine: any transformers causal LM, decoded in waves. The oracle that faster engines are compared with.

Requests wait until a wave of them is prefilled together, each distinct prompt once; then every step decodes one token
of every running row, and rows that finished are dropped from the cache. On one process it reads the trainer's own
module, so a weight sync copies nothing. Models that padding on the left disturbs get waves of equally long prompts, and
those whose cache cannot be used get every row computed anew for every token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.models.adapter_files import load_module
from posttrain.models.forward import next_logits, row_log_probs
from posttrain.models.lora import has_adapters
from posttrain.rollout.base import Output, Request, RolloutEngine, Row, Stage
from posttrain.rollout.sampling import sample, uniforms

MODES = {
    "cache": "",
    "equal lengths": "only prompts of one length together: padding changes what the model gives",
    "no cache": "without a cache, every token computed anew: slow, but transformers' cache does not serve this model",
}
"""How rows are decoded, and what a user should know of it; the first that is right is taken."""


@dataclass
class _Row(Row):
    drawn: list[float] = field(default_factory=list)

    def output(self, reason: str) -> Output:
        drawn = None if self.request.sampling.plain else self.drawn
        return Output(self.request.id, self.tokens, self.log_probs, reason, self.versions, drawn)


class HFEngine(RolloutEngine):
    """Decodes with `module` as it is now; `decode` turns ids into text for stop strings."""

    shares_weights = True

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        pad_token_id: int,
        max_num_seqs: int = 1024,
        decode: Callable[[list[int]], str] | None = None,
        mode: str = "cache",
    ) -> None:
        """`mode` is one of `MODES`."""
        self.module, self.pad, self.max_num_seqs, self.decode = module, pad_token_id, max_num_seqs, decode
        self.mode, self.takes_adapters = mode, has_adapters(module)
        self.waiting: deque[Request] = deque()
        self.rows: list[_Row] = []
        self._clear()

    def _clear(self) -> None:
        self.rows, self.cache, self.logits_BV = [], None, None
        self.mask_BL = torch.zeros(0, 0, dtype=torch.long)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def submit(self, request: Request) -> None:
        self.check_request(request)
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting or self.rows)

    def running_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @torch.no_grad()
    def step(self) -> list[Output]:
        self.module.eval()
        if not self.rows:
            if not self.waiting:
                return []
            self._prefill(self._wave())
        tokens_B, log_probs_B, drawn_B = self._sample()
        finished, keep = [], []
        columns = (tokens_B.tolist(), log_probs_B.tolist(), drawn_B.tolist())
        for place, (row, *made) in enumerate(zip(self.rows, *columns, strict=True)):
            token, log_prob, drawn = made
            row.add(token, log_prob, self.version)
            row.drawn.append(drawn)
            reason = self._finish_reason(row)
            if reason:
                finished.append(row.output(reason))
            else:
                keep.append(place)
        self._go_on(tokens_B, keep)
        return finished

    def _wave(self) -> list[Request]:
        """The requests that are decoded together from now on, in the order in which they came."""
        length = len(self.waiting[0].prompt_ids) if self.mode == "equal lengths" else None
        fitting = [r for r in self.waiting if length is None or len(r.prompt_ids) == length][: self.max_num_seqs]
        chosen = {id(request) for request in fitting}
        self.waiting = deque(request for request in self.waiting if id(request) not in chosen)
        return fitting

    def _prefill(self, requests: list[Request]) -> None:
        """One row per distinct prompt, left-padded; the cache is then spread over the requests."""
        if self.mode == "no cache":
            self.rows = [_Row(request) for request in requests]
            self.logits_BV = self._anew()
            return
        prompts = list(dict.fromkeys(tuple(r.prompt_ids) for r in requests))
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        self.mask_BL = mask.to(self.device)
        logits, self.cache = self._forward(ids.to(self.device), None)
        number = {prompt: index for index, prompt in enumerate(prompts)}
        spread = torch.tensor([number[tuple(r.prompt_ids)] for r in requests], device=self.device)
        self.rows = [_Row(request) for request in requests]
        self.logits_BV = logits[spread]
        self.mask_BL = self.mask_BL[spread]
        if len(requests) != len(prompts) or not torch.equal(spread.cpu(), torch.arange(len(prompts))):
            self.cache.reorder_cache(spread)

    def _anew(self) -> torch.Tensor:
        """The next logits of all rows, without a cache; each distinct row once."""
        rows = [(*row.request.prompt_ids, *row.tokens) for row in self.rows]
        number = {row: place for place, row in enumerate(dict.fromkeys(rows))}
        return next_logits(self.module, list(number))[[number[row] for row in rows]]

    def _forward(self, ids_BS: torch.Tensor, cache):
        position_BL = (self.mask_BL.cumsum(-1) - 1).clamp(min=0)[:, -ids_BS.shape[1] :]
        out = self.module(
            input_ids=ids_BS,
            attention_mask=self.mask_BL,
            position_ids=position_BL,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1], out.past_key_values

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.logits_BV is not None
        requests = [row.request for row in self.rows]
        seeds = np.asarray([r.seed & (2**64 - 1) for r in requests], np.uint64)
        uniform_B = uniforms(seeds, np.asarray([len(row.tokens) for row in self.rows]))
        seen = [(row.request.prompt_ids, row.tokens) for row in self.rows]
        return sample(self.logits_BV, [r.sampling for r in requests], torch.from_numpy(uniform_B), seen)

    def _finish_reason(self, row: _Row) -> str | None:
        sampling = row.request.sampling
        if row.tokens[-1] in sampling.stop_token_ids or row.stopped_by_text(self.decode):
            return "stop"
        return "length" if len(row.tokens) >= sampling.max_tokens else None

    def _go_on(self, tokens_B: torch.Tensor, keep: list[int]) -> None:
        """Drop finished rows and decode the next logits of the others."""
        if not keep:
            return self._clear()
        if self.mode == "no cache":
            self._keep_rows(keep)
            self.logits_BV = self._anew()
            return
        if len(keep) < len(self.rows):
            tokens_B = tokens_B[self._keep_rows(keep)]
        self.mask_BL = torch.cat([self.mask_BL, self.mask_BL.new_ones(len(keep), 1)], -1)
        self.logits_BV, self.cache = self._forward(tokens_B[:, None], self.cache)

    def release(self, ids: Iterable[Hashable]) -> None:
        """Nothing is kept here: a parent's cache is computed anew."""

    def abort(self, ids: Iterable[Hashable]) -> list[Output]:
        wanted = set(ids)
        gone = [_Row(request).output("abort") for request in self.waiting if request.id in wanted]
        self.waiting = deque(request for request in self.waiting if request.id not in wanted)
        gone += [row.output("abort") for row in self.rows if row.request.id in wanted]
        keep = [place for place, row in enumerate(self.rows) if row.request.id not in wanted]
        if not keep:
            self._clear()
        elif len(keep) < len(self.rows):
            assert self.logits_BV is not None
            self.logits_BV = self.logits_BV[self._keep_rows(keep)]
        return gone

    def _keep_rows(self, keep: list[int]) -> torch.Tensor:
        """Only these rows remain; gives them as an index."""
        index = torch.tensor(keep, device=self.device)
        self.rows = [self.rows[place] for place in keep]
        if self.cache is not None:
            self.cache.reorder_cache(index)
            self.mask_BL = self.mask_BL[index]
        return index

    @torch.no_grad()
    def score(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[torch.Tensor]:
        self.check_awake("weights")
        self.module.eval()
        return [log_probs.float().cpu() for log_probs in row_log_probs(self.module, token_ids, temperature)]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copies what does not already live in this module (the trainer's own tensors do)."""
        self.check_awake("weights")
        load_module(self.module, weights)
        self.version = version

    def cache_bytes(self) -> int:
        layers = [] if self.cache is None else self.cache.layers
        held = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _give_back(self) -> None:
        self._clear()

    def _take(self, stage: Stage) -> None:
        """Weights are where they were, the trainer's own; a cache is made for every wave."""
        self.module.eval()
