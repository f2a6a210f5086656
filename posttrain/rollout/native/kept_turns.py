"""The KV cache of ended turns, kept for the turns that continue them, and evicted where room is needed.

A turn keeps only the blocks that it has filled. Its continuation takes these over as they are: nothing is copied but a
half-full last block that somebody else needs too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from posttrain.rollout.native.pool import Pool, blocks_up_to, tokens_in
from posttrain.rollout.native.states import NO_STATE


@dataclass
class KeptTurn:
    """The tokens that are in the cache, and their blocks."""

    ids: Sequence[int]
    blocks: list[int]
    gap: int
    whole: int  # tokens before any were evicted
    state: int = NO_STATE  # the slot of the recurrent states behind all its tokens

    def common(self, ids: Sequence[int]) -> int:
        """How many of these tokens, from the first on, a continuation finds in the cache. A recurrent state is that
        behind all of the turn's tokens: with it, all or none."""
        most = min(len(self.ids), len(ids))
        if tuple(self.ids[:most]) == tuple(ids[:most]):  # a continuation nearly always begins with all of them
            return most if self.state == NO_STATE or most == len(self.ids) else 0
        if self.state != NO_STATE:
            return 0
        pairs = zip(self.ids, ids, strict=False)
        return next(place for place, (mine, other) in enumerate(pairs) if mine != other)


class KeptTurns:
    """Kept turns by the id of their request, in the order in which they ended."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.turns: dict[Hashable, KeptTurn] = {}
        self.awaited: dict[Hashable, int] = {}  # turns that queued requests continue, and how many; in queue order
        pool.evict, pool.states.evict = self.evict, self.evict_state

    def keep(self, id: Hashable, ids: Sequence[int], blocks: Sequence[int], gap: int, state: int) -> None:
        """Keep these tokens; `blocks` may go on behind them. `state`, that behind the last of them, is the turn's
        from now on."""
        self.release([id])
        self.pool.states.keep(state)
        filled = list(blocks[: blocks_up_to(len(ids), gap)])
        self.pool.keep(filled)
        self.turns[id] = KeptTurn(ids, filled, gap, len(ids), state)

    def release(self, ids: Iterable[Hashable]) -> None:
        for id in ids:
            if (turn := self.turns.pop(id, None)) is not None:
                self.pool.drop(turn.blocks)
                self.pool.states.drop(turn.state)

    def forget(self) -> None:
        self.release(list(self.turns))

    def evict(self, blocks: int) -> None:
        """Let go of kept blocks, until so many are available."""
        # Turns lose their last blocks first: what remains still serves their continuation. Blocks that others use as
        # well would not become free, so they go only where nothing else is left.
        for also_shared in (False, True):
            for id in self._least_useful_first():
                turn = self.turns[id]
                while self.pool.available < blocks and turn.blocks:
                    if not also_shared and self.pool.shared(turn.blocks[-1]):
                        break
                    self.pool.drop([turn.blocks.pop()])
                if (held := tokens_in(len(turn.blocks), turn.gap)) < len(turn.ids):
                    turn.ids = turn.ids[:held]
                    if turn.state != NO_STATE:  # it cannot be cut back to the tokens that are left
                        self.release([id])
                if not turn.blocks:
                    self.release([id])
                if self.pool.available >= blocks:
                    return

    def evict_state(self) -> None:
        """Let go of the turn with a state that is least useful."""
        with_state = (id for id in self._least_useful_first() if self.turns[id].state != NO_STATE)
        if (id := next(with_state, None)) is not None:
            self.release([id])

    def _least_useful_first(self) -> Iterator[Hashable]:
        """Turns that nobody awaits yet, the one that ended last first: requests are served in the order in which they
        come, so its continuation comes after the others. Then those that are awaited, from the end of the queue."""
        # At a quarter of the room 41% of turns found everything in this order, and 35% with the oldest first, awaited
        # or not: in rounds that evicts what the next request continues (scripts/measure_kv_reuse.py, grants of 128).
        yield from [id for id in reversed(self.turns) if id not in self.awaited]
        yield from [id for id in reversed(self.awaited) if id in self.turns]
