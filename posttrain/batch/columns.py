"""Columns of a batch that are made when they are first read: from counts, or from rows that lie elsewhere.

    data.batch.column("advantages")   the column as it is held: its shape is known, it can be cut, joined and sent
    data.batch["advantages"]          the tensor, made now

`MaskColumn`, `LastTokenColumn` and `EveryTokenColumn` are numbers per row that stand for a tensor over tokens.
`StoredColumn` pads sequences that a worker keeps (`rows.py`), `ObjectColumn` gives them as they are. A driver that
reads none of them moves counts and references, however long the responses are.

Shapes: B rows, P prompt width, R response width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np

from posttrain.batch.rows import RowPlaces
from posttrain.lazy import torch  # metrics read columns, and are imported where torch is not

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
