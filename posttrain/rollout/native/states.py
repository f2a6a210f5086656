"""Slots for the recurrent states of sequences, handed out by number.

A layer with a recurrent state keeps tensors of one size per sequence, however long it is. A slot holds those of all
layers. It belongs to one prompt, one running row or one kept turn: states change with every token, so they are copied
where blocks of keys and values are shared. A state cannot be cut back to fewer tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from posttrain.kernels.states import RowStates, StateStore

NO_STATE = -1  # of prompts, rows and turns of a model without recurrent layers


class StatePool:
    """At most `limit` slots; `bytes_per_slot` is 0 where the model has no recurrent layers, and every slot is then
    NO_STATE. `evict()` is called when none is free, and gives up a kept one."""

    def __init__(self, device: torch.device, *, limit: int = 0, bytes_per_slot: int = 0) -> None:
        self.device, self.limit, self.bytes_per_slot = device, limit, bytes_per_slot
        self.evict: Callable[[], None] = _nothing_to_evict
        self.clear()

    def clear(self) -> None:
        self.store = StateStore(self.device)
        self.free: list[int] = []
        self.busy = self.kept = 0  # slots that prompts and rows hold; those of kept turns

    @property
    def needed(self) -> bool:
        return self.bytes_per_slot > 0

    def fits(self, more: int) -> bool:
        return not self.needed or self.busy + more <= self.limit

    def reserve(self, more: int) -> None:
        """Have memory for this many slots more, as far as the limit allows."""
        if self.needed:
            size = min(self.limit, self.busy + self.kept + more)
            if size > self.store.size:
                self.free = [*range(size - 1, self.store.size - 1, -1), *self.free]
                self.store.grow(size)

    def take(self) -> int:
        """Hold a free slot. What is in it is another sequence's."""
        if not self.needed:
            return NO_STATE
        if not self.free:
            self.reserve(1 + self.busy // 8)
        if not self.free:
            self.evict()
        assert self.free, "a slot for a state was wanted, and none is free"
        self.busy += 1
        return self.free.pop()

    def copied(self, slot: int) -> int:
        """Hold another slot with the same states."""
        if slot == NO_STATE:
            return NO_STATE
        taken = self.take()
        self.store.copy(slot, taken)
        return taken

    def give_back(self, slot: int) -> None:
        if slot != NO_STATE:
            self.busy -= 1
            self.free.append(slot)

    def keep(self, slot: int) -> None:
        """A held slot becomes a kept one, which can be evicted."""
        if slot != NO_STATE:
            self.busy, self.kept = self.busy - 1, self.kept + 1

    def hold(self, slot: int) -> None:
        """A kept slot becomes a held one."""
        if slot != NO_STATE:
            self.busy, self.kept = self.busy + 1, self.kept - 1

    def drop(self, slot: int) -> None:
        """A kept slot becomes free."""
        if slot != NO_STATE:
            self.kept -= 1
            self.free.append(slot)

    def of_rows(self, slots: list[int], fresh: list[bool] | None = None) -> RowStates | None:
        """The states of the rows of a step; fresh rows (by default all of them) have none yet."""
        if not self.needed:
            return None
        return RowStates(self.store, np.asarray(slots, np.int64), np.asarray(fresh or [True] * len(slots), bool))


def _nothing_to_evict() -> None:
    return
