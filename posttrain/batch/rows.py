"""Rows that lie in a store: sequences of unequal lengths, in blocks that the process that made them keeps.

A block holds some rows: by name, all their values end to end, and where each row ends. `keep` puts one into this
process's store and gives its `Holder`, which travels in place of the block. In the process of a Ray rank that is
Ray's object store (`controller/ray_store.py`): ranks of one machine read it in place. Elsewhere it is plain memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

Ragged = tuple[np.ndarray, np.ndarray]
"""(the values of all rows end to end, the place behind the last value of each row)"""
Block = dict[str, Ragged]


class Holder(ABC):
    """A block that lies somewhere."""

    @abstractmethod
    def get(self) -> Block:
        """The block; its arrays may be read only."""


class Held(Holder):
    """A block in this process's memory. It travels with what refers to it."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def get(self) -> Block:
        return self.block


_put: Callable[[Block], Holder] | None = None


def use_store(put: Callable[[Block], Holder] | None) -> None:
    """Blocks that this process makes go there from now on; None keeps them in its memory."""
    global _put
    _put = put


def has_store() -> bool:
    """Whether other processes can read what this one keeps."""
    return _put is not None


def keep(columns: Mapping[str, Sequence[np.ndarray]]) -> Holder:
    """A block of these rows: by name an array for each of them."""
    block = {name: ragged(rows) for name, rows in columns.items()}
    return Held(block) if _put is None else _put(block)


def ragged(rows: Sequence[np.ndarray]) -> Ragged:
    """These rows end to end."""
    return np.concatenate(rows), np.cumsum([len(row) for row in rows])


def key_of(tokens: np.ndarray) -> tuple[int, int]:
    """A digest: equal for equal tokens, and for no others that anyone will meet."""
    found = blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest()
    first, second = np.frombuffer(found, np.int64).tolist()
    return first, second


class RowPlaces:
    """Where each row of a batch lies: in which block, and which of its rows it is."""

    def __init__(self, holders: Sequence[Holder], holder_B: np.ndarray, row_B: np.ndarray) -> None:
        self.holders, self.holder_B, self.row_B = list(holders), holder_B, row_B

    @classmethod
    def of_block(cls, holder: Holder, rows: int) -> RowPlaces:
        """All rows of one block."""
        return cls([holder], np.zeros(rows, np.int64), np.arange(rows))

    def __len__(self) -> int:
        return len(self.row_B)

    def take(self, where: Any) -> RowPlaces:
        """Some of them; blocks in which none of these lies are let go."""
        used, holder_B = np.unique(self.holder_B[where], return_inverse=True)
        return RowPlaces([self.holders[number] for number in used.tolist()], holder_B, self.row_B[where])

    @staticmethod
    def join(parts: Sequence[RowPlaces]) -> RowPlaces:
        """The rows of all parts in order."""
        holders = [holder for part in parts for holder in part.holders]
        starts = np.cumsum([0, *(len(part.holders) for part in parts[:-1])])
        holder_B = np.concatenate([part.holder_B + start for part, start in zip(parts, starts, strict=True)])
        return RowPlaces(holders, holder_B, np.concatenate([part.row_B for part in parts]))

    def rows(self, name: str) -> list[np.ndarray]:
        """The values of each row, read where they lie."""
        found = [holder.get()[name] for holder in self.holders]
        rows = []
        for number, row in zip(self.holder_B.tolist(), self.row_B.tolist(), strict=True):
            values, ends = found[number]
            rows.append(values[(ends[row - 1] if row else 0) : ends[row]])
        return rows

    def __getstate__(self) -> dict[str, Any]:
        # Of a block in memory only these rows travel; a block of a store stays where it is.
        local = [number for number, holder in enumerate(self.holders) if isinstance(holder, Held)]
        if not local:
            return vars(self)
        holders, row_B = list(self.holders), self.row_B.copy()
        for number in local:
            own = np.flatnonzero(self.holder_B == number)
            block = holders[number].get()
            places = RowPlaces([holders[number]], np.zeros(len(own), np.int64), self.row_B[own])
            holders[number] = Held({name: ragged(places.rows(name)) for name in block})
            row_B[own] = np.arange(len(own))
        return {"holders": holders, "holder_B": self.holder_B, "row_B": row_B}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["holders"], state["holder_B"], state["row_B"])
