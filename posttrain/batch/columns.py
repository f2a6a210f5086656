"""Columns of a batch that are made when they are first read: from counts, or from rows that lie elsewhere.

    data.batch.column("advantages")   the column as it is held: its shape is known, it can be cut, joined and sent
    data.batch["advantages"]          the tensor, made now

`MaskColumn`, `LastTokenColumn` and `EveryTokenColumn` are numbers per row that stand for a tensor over tokens.
`StoredColumn` pads sequences that a worker keeps, `ObjectColumn` gives them as they are. A driver that reads none of
them moves counts and references, however long the responses are.

Rows lie in blocks that the process that made them keeps. A block holds some rows: by name, all their values end to end,
and where each row ends. `keep` puts one into this process's store and gives its `Holder`, which travels in place of the
block. In the process of a Ray rank that is Ray's object store (`controller/rank_host.py`): ranks of one machine read it
in place. Elsewhere it is plain memory.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from posttrain.lazy import torch  # metrics read columns, and are imported where torch is not

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


Index = slice | np.ndarray
Taken = dict[int, Any]
"""What was cut or joined in one operation, by identity: columns that share their rows share them afterwards, too."""

C = TypeVar("C", bound="Column")


@dataclass(frozen=True, eq=False)
class Column(ABC):
    """A column that is not made yet. Fields that are arrays or `RowPlaces` have one entry per row."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Of the tensor."""

    @abstractmethod
    def value(self) -> Any:
        """The tensor, or for non-tensor fields the array."""

    def __len__(self) -> int:
        return self.shape[0]

    def take(self: C, where: Index, taken: Taken) -> C:
        """Some of the rows."""
        return replace(self, **{name: take_once(value, where, taken) for name, value in self._by_row().items()})

    def _by_row(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray | RowPlaces | Column)}

    def join(self: C, others: Sequence[Column], joined: Taken) -> C | None:
        """The rows of all of them, as wide as the widest; None where they must be made first."""
        own, parts = self._by_row(), [self, *others]
        rest = [field.name for field in fields(self) if field.name not in own]
        for other in others:
            if type(other) is not type(self):
                return None
            if any(getattr(other, name) != getattr(self, name) for name in rest if name not in _WIDTHS):
                return None
        found: dict[str, Any] = {name: _join([getattr(part, name) for part in parts], joined) for name in own}
        if any(value is None for value in found.values()):
            return None
        found |= {name: max(getattr(part, name) for part in parts) for name in rest if name in _WIDTHS}
        return replace(self, **found)

    def row_sums(self) -> np.ndarray:
        """(B,) in float64: the sum over each row's tokens."""
        return self.value().double().sum(-1).numpy()


_WIDTHS = ("width", "prompt_width")


def take_once(value: Any, where: Index, taken: Taken) -> Any:
    """Some rows of an array, of places or of a column; the same object again where it was cut before."""
    if id(value) not in taken:
        if isinstance(value, Column):
            cut = value.take(where, taken)
        else:
            cut = value.take(where) if isinstance(value, RowPlaces) else value[where]
        # With the value itself, so that no other one gets its identity meanwhile.
        taken[id(value)] = value, cut
    return taken[id(value)][1]


def _join(values: list[Any], joined: Taken) -> Any:
    first = values[0]
    if id(first) not in joined:
        if isinstance(first, Column):
            made = first.join(values[1:], joined)
        else:
            made = RowPlaces.join(values) if isinstance(first, RowPlaces) else np.concatenate(values)
        joined[id(first)] = values, made
    return joined[id(first)][1]


@dataclass(frozen=True, eq=False)
class MaskColumn(Column):
    """1 on each row's tokens: `prompt_B` of them at the end of P places, then `response_B` at the start of `width`.
    With `counted`, their positions in place of 1."""

    response_B: np.ndarray
    width: int
    prompt_B: np.ndarray | None = None
    prompt_width: int = 0
    counted: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.response_B), self.prompt_width + self.width))

    def value(self) -> torch.Tensor:
        """In int64."""
        mask = torch.arange(self.width) < torch.from_numpy(self.response_B)[:, None]
        if self.prompt_B is not None:
            first_B = self.prompt_width - torch.from_numpy(self.prompt_B)
            mask = torch.cat([torch.arange(self.prompt_width) >= first_B[:, None], mask], -1)
        return (mask.long().cumsum(-1) - 1).clamp(min=0) if self.counted else mask.long()

    def row_sums(self) -> np.ndarray:
        if self.counted:
            return super().row_sums()
        return (self.response_B if self.prompt_B is None else self.response_B + self.prompt_B).astype(np.float64)


@dataclass(frozen=True, eq=False)
class _NumberColumn(Column):
    """A number for each response, on some of its tokens; 0 elsewhere."""

    values_B: np.ndarray
    response_B: np.ndarray
    width: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.values_B), self.width))


class LastTokenColumn(_NumberColumn):
    """A number on each response's last token, 0 elsewhere."""

    def value(self) -> torch.Tensor:
        made = torch.zeros(self.shape, dtype=torch.from_numpy(self.values_B).dtype)
        last_B = torch.from_numpy(self.response_B - 1).clamp(min=0)
        made[torch.arange(len(made)), last_B] = torch.from_numpy(self.values_B)
        return made

    def row_sums(self) -> np.ndarray:
        return self.values_B.astype(np.float64)


class EveryTokenColumn(_NumberColumn):
    """A number on every token of a response, 0 behind it."""

    def value(self) -> torch.Tensor:
        real = torch.arange(self.width) < torch.from_numpy(self.response_B)[:, None]
        values_B1 = torch.from_numpy(self.values_B)[:, None]
        return torch.where(real, values_B1, torch.zeros((), dtype=values_B1.dtype))

    def row_sums(self) -> np.ndarray:
        return self.values_B.astype(np.float64) * self.response_B


@dataclass(frozen=True, eq=False)
class StoredColumn(Column):
    """Sequences of a store, padded to `width` with `fill`: prompts on the left, all else on the right.

    `keys_B2` are digests: rows with equal ones and equal lengths have equal tokens (of a response, all but its last
    one, which predicts nothing).
    """

    places: RowPlaces
    name: str  # in the store
    length_B: np.ndarray
    width: int
    dtype: torch.dtype
    fill: int = 0
    left: bool = False
    keys_B2: np.ndarray | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.length_B), self.width))

    def value(self) -> torch.Tensor:
        made = torch.full(self.shape, self.fill, dtype=self.dtype)
        numbers = made.numpy()
        for row, found in enumerate(self.places.rows(self.name)):
            if self.left:
                numbers[row, self.width - len(found) :] = found
            else:
                numbers[row, : len(found)] = found
        return made


@dataclass(frozen=True, eq=False)
class PairColumn(Column):
    """Two columns side by side: `input_ids` of prompts and responses."""

    left: StoredColumn
    right: StoredColumn

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.left), self.left.width + self.right.width))

    def value(self) -> torch.Tensor:
        return torch.cat([self.left.value(), self.right.value()], -1)


@dataclass(frozen=True, eq=False)
class ObjectColumn(Column):
    """Arrays of a store, one per row, as a non-tensor field: routes of experts."""

    places: RowPlaces
    name: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.places),))

    def value(self) -> np.ndarray:
        made = np.empty(len(self.places), dtype=object)
        for row, found in enumerate(self.places.rows(self.name)):
            made[row] = np.array(found)
        return made
