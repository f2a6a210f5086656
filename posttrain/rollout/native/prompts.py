"""Prompts, computed once for all the requests that begin with them, and the rows that start from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.rollout.base import Output, Request
from posttrain.rollout.native.states import NO_STATE


@dataclass
class Progress:
    """What a preempted row has made so far."""

    tokens: list[int]
    log_probs: np.ndarray
    drawn: list[float] | None
    spans: list[tuple[int, int]]

    def output(self, request: Request, reason: str) -> Output:
        return Output(request.id, self.tokens, self.log_probs, reason, self.spans, self.drawn)


@dataclass(eq=False)
class Prompt:
    """One distinct prompt: the requests that wait for it, and its blocks once it is being computed."""

    key: Hashable  # in the queue
    ids: tuple[int, ...]
    waiting: deque[Request] = field(default_factory=deque)
    gap: int = 0  # where the blocks of its rows begin; see pool.py
    blocks: list[int] = field(default_factory=list)
    state: int = NO_STATE  # the slot of its recurrent states, behind the computed tokens
    computed: int = 0  # tokens whose keys and values are in the cache
    running: int = 0  # rows
    logits_V: torch.Tensor | None = None  # after its last token, kept while requests wait
    history: int = -1  # the number of its rows' common past; given when the first of them starts
    place: int = -1  # of its logits among those of the step that is being computed
    parent: Hashable | None = None  # the ended request that it continues
    progress: Progress | None = None  # of its only request, which was preempted

    @property
    def ready(self) -> bool:
        return self.computed == len(self.ids)

    def tokens_left(self, request: Request) -> int:
        return request.sampling.max_tokens - (0 if self.progress is None else len(self.progress.tokens))


Piece = tuple[Prompt, int, int]


@dataclass
class NewRow:
    """A request that can run: its prompt is computed, and `blocks` hold the prompt and `granted` tokens behind it, and
    `state` is the slot of its own recurrent states."""

    request: Request
    prompt: Prompt
    blocks: list[int]
    state: int
    granted: int
