"""Prompts computed once for all the requests that begin with them, and the order in which requests are let in."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch

from posttrain.rollout.base import Request
from posttrain.rollout.native.pool import Pool, blocks_for


@dataclass(eq=False)
class Prompt:
    """One distinct prompt: the requests that wait for it, and its blocks once it is being computed."""

    ids: tuple[int, ...]
    waiting: deque[Request] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the cache
    rows: int = 0  # running rows that read its blocks
    logits_V: torch.Tensor | None = None  # after its last token, kept while requests wait
    history: int = -1  # the number of its rows' common past; given when the first of them starts
    place: int = -1  # of its logits among those of the step that is being computed

    @property
    def ready(self) -> bool:
        return self.computed == len(self.ids)

    def own_blocks(self, request: Request) -> int:
        """Blocks that a row needs of its own: for its response. The prompt's are read by all and written by none."""
        return blocks_for(request.sampling.max_tokens)


Piece = tuple[Prompt, int, int]


class Queue:
    """Waiting requests by prompt, first come, first served.

    A prompt is opened (given blocks) when there are slots for its requests, and only with room for its first row kept
    aside: whatever is open can always finish.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self.opened: list[Prompt] = []

    def add(self, request: Request) -> None:
        ids = tuple(request.prompt_ids)
        self.pool.check(len(ids), request.sampling.max_tokens)
        if ids not in self.prompts:
            self.prompts[ids] = Prompt(ids)
        self.prompts[ids].waiting.append(request)

    def remove(self, wanted: set[Hashable]) -> list[Request]:
        """Take these requests out; gives those that were waiting."""
        gone = []
        for prompt in list(self.prompts.values()):
            gone += [request for request in prompt.waiting if request.id in wanted]
            prompt.waiting = deque(request for request in prompt.waiting if request.id not in wanted)
            self._retire(prompt)
        return gone

    def open(self, room: int) -> None:
        """Open as many prompts, in order, as there are slots and blocks for."""
        room -= sum(len(prompt.waiting) for prompt in self.opened)
        if room > 0:
            self._reserve(room)
        kept = self._kept_aside()
        for prompt in self.prompts.values():
            if prompt.blocks:
                continue
            first = prompt.own_blocks(prompt.waiting[0])
            if room <= 0 or not self.pool.fits(kept + blocks_for(len(prompt.ids)) + first):
                break
            prompt.blocks = self.pool.take(blocks_for(len(prompt.ids)))
            self.opened.append(prompt)
            kept, room = kept + first, room - len(prompt.waiting)

    def _reserve(self, room: int) -> None:
        """Memory for all that can be let in, at once."""
        blocks = 0
        for prompt in self.prompts.values():
            blocks += sum(prompt.own_blocks(request) for request in prompt.waiting)
            if not prompt.blocks:
                blocks, room = blocks + blocks_for(len(prompt.ids)), room - len(prompt.waiting)
            if room <= 0:
                break
        self.pool.reserve(blocks)

    def _kept_aside(self) -> int:
        """Blocks that the first rows of open prompts must still find."""
        return sum(p.own_blocks(p.waiting[0]) for p in self.opened if p.waiting and not p.rows)

    def next_pieces(self, budget: int) -> list[Piece]:
        """(prompt, start, end) of what this step computes of open prompts."""
        pieces = []
        for prompt in self.opened:
            if not prompt.ready and budget > 0:
                end = min(len(prompt.ids), prompt.computed + budget)
                pieces.append((prompt, prompt.computed, end))
                budget -= end - prompt.computed
        return pieces

    def start(self, room: int) -> Iterator[tuple[Request, Prompt, list[int]]]:
        """Requests that can run now, with their prompts and their own blocks."""
        kept = self._kept_aside()
        for prompt in [prompt for prompt in self.opened if prompt.ready]:
            while prompt.waiting and room > 0:
                own = prompt.own_blocks(prompt.waiting[0])
                kept -= 0 if prompt.rows else own
                if not self.pool.fits(kept + own):
                    break
                prompt.rows, room = prompt.rows + 1, room - 1
                yield prompt.waiting.popleft(), prompt, self.pool.take(own)
            self._retire(prompt)

    def row_done(self, prompt: Prompt, own: list[int]) -> None:
        """A row has ended: its blocks are free, and its prompt's if it was the last to need them."""
        self.pool.give_back(own)
        prompt.rows -= 1
        self._retire(prompt)

    def _retire(self, prompt: Prompt) -> None:
        if prompt.waiting:
            return
        if self.prompts.get(prompt.ids) is prompt:
            del self.prompts[prompt.ids]
            if prompt in self.opened:
                self.opened.remove(prompt)
        if not prompt.rows:
            self._close(prompt)

    def _close(self, prompt: Prompt) -> None:
        self.pool.give_back(prompt.blocks)
        prompt.blocks, prompt.computed, prompt.logits_V = [], 0, None

    def forget(self) -> None:
        """The weights have changed: waiting requests need their prompts anew; running rows go on with theirs."""
        self.opened = []
        for ids, prompt in list(self.prompts.items()):
            if prompt.rows:
                self.prompts[ids] = Prompt(ids, prompt.waiting)
                prompt.waiting = deque()
            else:
                self._close(prompt)
