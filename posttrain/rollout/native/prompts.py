"""Prompts computed once for all the requests that begin with them, and the order in which requests are let in.

A request may leave its cache behind for the next turn, whose prompt begins with this one's prompt and response: their
keys and values are copied to where the new prompt lies, a pass over memory instead of one through the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from posttrain.kernels.decode import BLOCK
from posttrain.rollout.base import Request
from posttrain.rollout.native.pool import Pool, blocks_for


@dataclass(eq=False)
class Prompt:
    """One distinct prompt: the requests that wait for it, and its blocks once it is being computed."""

    ids: tuple[int, ...]
    waiting: deque[Request] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the cache
    rows: int = 0  # rows that read its blocks: those that run, and ended ones that left their cache behind
    running: int = 0
    logits_V: torch.Tensor | None = None  # after its last token, kept while requests wait
    history: int = -1  # the number of its rows' common past; given when the first of them starts
    place: int = -1  # of its logits among those of the step that is being computed
    parent: Hashable | None = None  # the ended request that it goes on from

    @property
    def ready(self) -> bool:
        return self.computed == len(self.ids)

    def own_blocks(self, request: Request) -> int:
        """Blocks that a row needs of its own: for its response. The prompt's are read by all and written by none."""
        return blocks_for(request.sampling.max_tokens)


Piece = tuple[Prompt, int, int]


@dataclass
class Left:
    """What an ended row left behind: the tokens that are in the cache, its prompt, and its own blocks."""

    ids: Sequence[int]
    prompt: Prompt
    own: list[int]

    def same(self, ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are there."""
        pairs = zip(self.ids, ids, strict=False)
        return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), min(len(self.ids), len(ids)))

    def places(self, count: int) -> list[int]:
        """Where the first `count` tokens lie."""
        inner = min(count, len(self.prompt.ids))
        return _places(self.prompt.blocks, inner) + _places(self.own, count - inner)


def _places(blocks: list[int], count: int) -> list[int]:
    return [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(count)]


class Queue:
    """Waiting requests by prompt, first come, first served.

    A prompt is opened (given blocks) when there are slots for its requests, and only with room for its first row kept
    aside: whatever is open can always finish.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.prompts: dict[tuple[int, ...], Prompt] = {}
        self.opened: list[Prompt] = []
        self.left: dict[Hashable, Left] = {}  # oldest first

    def add(self, request: Request) -> None:
        ids = tuple(request.prompt_ids)
        self.pool.check(len(ids), request.sampling.max_tokens)
        prompt = self.prompts.get(ids)
        if prompt is None:
            prompt = self.prompts[ids] = Prompt(ids, parent=request.parent)
        prompt.waiting.append(request)

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
            if room <= 0 or not self._fits(kept + blocks_for(len(prompt.ids)) + first):
                break
            prompt.blocks = self.pool.take(blocks_for(len(prompt.ids)))
            prompt.computed = self._copied(prompt)
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
        return sum(p.own_blocks(p.waiting[0]) for p in self.opened if p.waiting and not p.running)

    def next_pieces(self, budget: int) -> list[Piece]:
        """(prompt, start, end) of what this step computes of open prompts."""
        pieces = []
        for prompt in self.opened:
            if not prompt.ready and budget > 0:
                end = min(len(prompt.ids), prompt.computed + budget)
                pieces.append((prompt, prompt.computed, end))
                budget -= end - prompt.computed
        return pieces

    def unfinished(self) -> bool:
        """Whether there is more to compute of open prompts."""
        return any(not prompt.ready for prompt in self.opened)

    def start(self, room: int) -> Iterator[tuple[Request, Prompt, list[int]]]:
        """Requests that can run now, with their prompts and their own blocks."""
        kept = self._kept_aside()
        for prompt in [prompt for prompt in self.opened if prompt.ready]:
            while prompt.waiting and room > 0:
                own = prompt.own_blocks(prompt.waiting[0])
                # Only running rows count. `_fits` may evict ended ones, which would change the sum halfway:
                # it became negative, and rows were given fewer blocks than they write to.
                kept -= 0 if prompt.running else own
                if not self._fits(kept + own):
                    kept += 0 if prompt.running else own
                    break
                prompt.rows, prompt.running, room = prompt.rows + 1, prompt.running + 1, room - 1
                yield prompt.waiting.popleft(), prompt, self.pool.take(own)
            self._retire(prompt)

    def row_done(self, prompt: Prompt, own: list[int]) -> None:
        """A row has ended: its blocks are free, and its prompt's if it was the last to need them."""
        prompt.running -= 1
        self._free(prompt, own)

    def _free(self, prompt: Prompt, own: list[int]) -> None:
        self.pool.give_back(own)
        prompt.rows -= 1
        if not prompt.rows:
            self._retire(prompt)

    def leave(self, id: Hashable, left: Left) -> None:
        """A row has ended, and what it wrote is kept for the next turn."""
        self.release([id])
        left.prompt.running -= 1
        self.left[id] = left

    def release(self, ids: Iterable[Hashable]) -> None:
        for id in ids:
            if (left := self.left.pop(id, None)) is not None:
                self._free(left.prompt, left.own)

    def _fits(self, blocks: int) -> bool:
        """Whether there is room; what was left behind makes place, the oldest first."""
        while not self.pool.fits(blocks) and self.left:
            self.release([next(iter(self.left))])
        return self.pool.fits(blocks)

    def _copied(self, prompt: Prompt) -> int:
        """Take over what the parent has of a prompt's tokens, the last one aside: its logits are wanted."""
        left = self.left.get(prompt.parent)
        count = left.same(prompt.ids[:-1]) if left is not None else 0
        if left is not None and count:
            self.pool.copy(left.places(count), _places(prompt.blocks, count))
        return count

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
        self.release(list(self.left))
        self.opened = []
        for ids, prompt in list(self.prompts.items()):
            if prompt.rows:
                self.prompts[ids] = Prompt(ids, prompt.waiting)
                prompt.waiting = deque()
            else:
                self._close(prompt)
