"""DataProto: the batch that flows through rollout, reward, advantages and update; each stage adds its fields.

It has three parts: `batch` (tensors that share the first dimension), `non_tensor_batch` (numpy object arrays of the
same length) and `meta_info` (a dict about the whole batch). Prompts are padded on the left, responses on the right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.batch.columns import Column, Taken
from posttrain.batch.fields import (
    DecodedText,
    Fields,
    ObjectBatch,
    RowView,
    TensorBatch,
    check_widths,
    pad_to_common_width,
    row_index,
    same,
)
from posttrain.batch.saving import read_folder, write_folder

Names = Sequence[str] | str | None


class DataProto:
    """A batch of rows. Example: `DataProto.from_dict({"responses": ids}, {"uid": ["a", "a", "b", "b"]})`.

    Operations that choose rows (`repeat`, `split`, indexing, ...) give a new DataProto; slices share memory with the
    old one. `union`, `rename`, `pop`, `reorder` and `to` change the object itself.
    """

    def __init__(
        self,
        batch: Mapping[str, torch.Tensor | Column] | None = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.batch = batch if isinstance(batch, TensorBatch) else TensorBatch(batch)
        objects = non_tensor_batch if isinstance(non_tensor_batch, ObjectBatch) else ObjectBatch(non_tensor_batch)
        self.non_tensor_batch = objects
        self.meta_info: dict[str, Any] = dict(meta_info or {})
        self.batch.rows = objects.rows = self._rows

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """A batch of tensors and of lists or arrays with one value per row; widths are checked."""
        data = cls(tensors, non_tensors, meta_info)
        check_widths(data.batch)
        return data

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """As `from_dict`, from one mapping: tensors go into `batch`, all else into `non_tensor_batch`."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, {name: value for name, value in data.items() if name not in tensors}, meta_info)

    @property
    def _rows(self) -> int | None:
        tensors, objects = self.batch, self.non_tensor_batch
        if tensors.rows is not None and objects.rows is not None and tensors.rows != objects.rows:
            raise ValueError(f"tensors of {_first_shape(tensors)} beside non-tensor fields of {_first_shape(objects)}")
        return objects.rows if tensors.rows is None else tensors.rows

    def __len__(self) -> int:
        return self._rows or 0

    def __repr__(self) -> str:
        lines = [f"DataProto({len(self)} rows", f"batch: {self.batch}"]
        lines += [f"non_tensor_batch: {', '.join(self.non_tensor_batch)}", f"meta_info: {self.meta_info})"]
        return "\n  ".join(lines)

    # Texts that are made on first reading

    def set_decoder(self, decode: Callable[[list[int]], str] | None) -> DataProto:
        """Lets `non_tensor_batch["prompt"]` and `["response"]` be decoded from the token ids on first reading.

        `decode` gets the ids of one row without padding. It goes along with choices of rows, but neither to disk nor
        through pickle.
        """
        self.non_tensor_batch.decoded = None if decode is None else DecodedText(self.batch, decode)
        return self

    def _with_decoder_of(self, other: DataProto) -> DataProto:
        decoded = other.non_tensor_batch.decoded
        return self.set_decoder(None if decoded is None else decoded.decode)

    # Without the decoder: it holds a tokenizer, which every process has its own of.
    def __getstate__(self) -> dict[str, Any]:
        return {
            "batch": self.batch.columns(),
            "non_tensor_batch": self.non_tensor_batch.columns(),
            "meta_info": self.meta_info,
            "rows": self._rows,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state["rows"]
        batch, objects = TensorBatch(state["batch"], rows), ObjectBatch(state["non_tensor_batch"], rows)
        DataProto.__init__(self, batch, objects, state["meta_info"])

    # Choosing rows

    def _take(self, index: Any) -> DataProto:
        where, taken = row_index(index, len(self)), {}
        cut = DataProto(self.batch.take(where, taken), self.non_tensor_batch.take(where, taken), self.meta_info)
        return cut._with_decoder_of(self)

    def __getitem__(self, index: Any) -> Any:
        """A row (`DataProtoItem`) for an int; a DataProto for a slice, list, range, mask, array or tensor."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)} rows")
            return DataProtoItem(self, int(index) % len(self))
        return self._take(index)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self[row] for row in range(len(self)))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row `repeat_times` times: a,a,b,b when interleaved, else a,b,a,b."""
        if repeat_times < 1:
            raise ValueError(f"repeat_times is {repeat_times}; it must be at least 1")
        rows = torch.arange(len(self))
        return self._take(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def reorder(self, indices: Any) -> DataProto:
        """The same rows in another order, in place; row i becomes the old row `indices[i]`."""
        where = row_index(indices, len(self))
        if isinstance(where, slice) or sorted(where.tolist()) != list(range(len(self))):
            raise ValueError(f"reorder needs each of the {len(self)} rows exactly once")
        moved = self._take(where)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch
        return self

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of `split_size` rows in order; the last may be smaller."""
        if split_size < 1:
            raise ValueError(f"split({split_size}): a part needs at least 1 row")
        return [self._take(slice(start, start + split_size)) for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """This many parts of equal size, one per worker; the rows must divide evenly (`pad_to_divisor` makes them)."""
        if chunks < 1 or len(self) == 0 or len(self) % chunks:
            raise ValueError(
                f"{len(self)} rows cannot be cut into {chunks} equal parts; call pad_to_divisor({chunks}) first"
            )
        return self.split(len(self) // chunks)

    def pad_to_divisor(self, size_divisor: int) -> tuple[DataProto, int]:
        """The batch with rows repeated from its start until `size_divisor` divides them, and how many were added.

        The added rows are real rows: take them off again (`unpad`) before anything is averaged or trained on.
        """
        if len(self) == 0:
            raise ValueError("a batch of 0 rows cannot be padded: it has no row to repeat")
        added = -len(self) % size_divisor
        return self._take([row % len(self) for row in range(len(self) + added)]) if added else self, added

    def unpad(self, pad_size: int) -> DataProto:
        """The batch without its last `pad_size` rows."""
        if not 0 <= pad_size <= len(self):
            raise ValueError(f"unpad({pad_size}) of a batch of {len(self)} rows")
        return self._take(slice(0, len(self) - pad_size))

    def make_iterator(self, mini_batch_size: int, epochs: int = 1, seed: int | None = None) -> Iterator[DataProto]:
        """Mini-batches of `mini_batch_size` rows (the last of an epoch may be smaller), `epochs` times over.

        Without `seed` rows come in order; with it each epoch has its own order, a function of (seed, epoch) alone.
        """
        for epoch in range(epochs):
            rows = np.arange(len(self))
            # From (seed, epoch) alone, not from a generator's state: a resumed run makes the same mini-batches.
            if seed is not None:
                rows = np.random.RandomState([seed % 2**32, epoch]).permutation(len(self))
            yield from self._take(rows).split(mini_batch_size)

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts in order; all need the same fields and equal `meta_info` values under equal keys.

        Parts whose prompts or responses were padded to different widths are padded to the widest (see
        `pad_to_common_width`); the fill of token ids is `meta_info["pad_token_id"]`, 0 without it.
        """
        if not parts:
            raise ValueError("concat of no batches")
        meta_info: dict[str, Any] = {}
        for part in parts:
            _merge_meta_info(meta_info, part.meta_info)
        rows, done = sum(len(part) for part in parts), {}
        tensors: dict[str, Any] = _joined_columns([part.batch for part in parts], done)
        padded = pad_to_common_width([part.batch for part in parts], int(meta_info.get("pad_token_id") or 0))
        tensors |= {n: _cat(n, [part[n] for part in padded]) for n in _all_names(padded) if n not in tensors}
        objects = [part.non_tensor_batch for part in parts]
        arrays: dict[str, Any] = _joined_columns(objects, done)
        arrays |= {n: np.concatenate([fields[n] for fields in objects]) for n in _all_names(objects) if n not in arrays}
        joined = DataProto(TensorBatch(tensors, rows), ObjectBatch(arrays, rows), meta_info)
        return joined._with_decoder_of(parts[0])

    # Choosing fields

    def select(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> DataProto:
        """A batch with only these fields (None: all of that kind); tensors are shared, not copied."""
        tensors = _names(batch_keys, self.batch)
        objects = _names(non_tensor_batch_keys, self.non_tensor_batch)
        batch = TensorBatch({name: self.batch.column(name) for name in tensors}, rows=self._rows)
        arrays = ObjectBatch({name: self.non_tensor_batch.column(name) for name in objects}, rows=self._rows)
        meta_info = {name: self.meta_info[name] for name in _names(meta_info_keys, self.meta_info)}
        return DataProto(batch, arrays, meta_info)._with_decoder_of(self)

    def pop(
        self, batch_keys: Names = None, non_tensor_batch_keys: Names = None, meta_info_keys: Names = None
    ) -> DataProto:
        """Takes these fields out (None: none of that kind) and gives them as a batch of their own."""
        tensors, objects, infos = _names(batch_keys, []), _names(non_tensor_batch_keys, []), _names(meta_info_keys, [])
        popped = self.select(tensors, objects, infos)
        for names, fields in ((tensors, self.batch), (objects, self.non_tensor_batch), (infos, self.meta_info)):
            for name in names:
                del fields[name]
        return popped

    def rename(self, old_keys: Sequence[str] | str, new_keys: Sequence[str] | str) -> DataProto:
        """Renames tensors or non-tensor fields in place; a name that is taken already is an error."""
        old, new = _names(old_keys, []), _names(new_keys, [])
        if len(old) != len(new):
            raise ValueError(f"rename of {len(old)} fields to {len(new)} names")
        homes: list[Fields[Any]] = [self.batch if name in self.batch else self.non_tensor_batch for name in old]
        values = [home.column(name) for home, name in zip(homes, old, strict=True)]
        for name in new:
            if name not in old and (name in self.batch or name in list(self.non_tensor_batch)):
                raise ValueError(f"rename: the batch has a field '{name}' already")
        # All are taken out before any is put back, so that two fields can swap their names.
        for home, name in zip(homes, old, strict=True):
            del home[name]
        for home, name, value in zip(homes, new, values, strict=True):
            home[name] = value
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the other's fields in place; a field or `meta_info` key that differs between the two is an error."""
        if len(self) != len(other):
            raise ValueError(f"union of a batch of {len(self)} rows and one of {len(other)} rows")
        meta_info = dict(self.meta_info)
        _merge_meta_info(meta_info, other.meta_info)
        pairs: list[tuple[Fields[Any], Fields[Any]]] = [
            (self.batch, other.batch),
            (self.non_tensor_batch, other.non_tensor_batch),
        ]
        # All checks come first: a union that fails leaves the batch as it was.
        for mine, theirs in pairs:
            for name in set(mine) & set(theirs):
                if mine.column(name) is not theirs.column(name) and not same(mine[name], theirs[name]):
                    raise ValueError(
                        f"union: both batches have the {mine.kind} '{name}' with different values "
                        f"(shapes {tuple(mine[name].shape)} and {tuple(theirs[name].shape)}); pop one of them first"
                    )
        check_widths(TensorBatch({**self.batch.columns(), **other.batch.columns()}))
        for mine, theirs in pairs:
            mine.update(theirs.columns())
        self.meta_info = meta_info
        return self if self.non_tensor_batch.decoded else self._with_decoder_of(other)

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the tensors in place; to a CUDA device without waiting for what it is doing."""
        to_cuda = torch.device(device).type == "cuda"
        for name, tensor in list(self.batch.items()):
            # Only from pinned memory does a copy run beside what the device computes.
            pinned = tensor.pin_memory() if to_cuda and tensor.device.type == "cpu" else tensor
            self.batch[name] = pinned.to(device, non_blocking=to_cuda)
        return self

    # Disk

    def save_to_disk(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder with `tensors.safetensors` and `fields.json`.

        Values keep their types (`posttrain.batch.saving`); one of another type is an error that says where it is.
        """
        write_folder(Path(path), len(self), self.batch, self.non_tensor_batch, self.meta_info)

    @staticmethod
    def load_from_disk(path: str | os.PathLike[str]) -> DataProto:
        """Reads what `save_to_disk` wrote; the tensors come onto the CPU."""
        return DataProto(*read_folder(Path(path)))


class DataProtoItem:
    """One row: `item.batch["responses"]` is a tensor without the first dimension, other fields are values."""

    def __init__(self, data: DataProto, row: int) -> None:
        self.batch = RowView(data.batch, row)
        self.non_tensor_batch = RowView(data.non_tensor_batch, row)
        self.meta_info = data.meta_info


def _names(keys: Names, default: Any) -> list[str]:
    return list(default) if keys is None else [keys] if isinstance(keys, str) else list(keys)


def _all_names(parts: Sequence[Fields[Any]]) -> list[str]:
    return list(dict.fromkeys(name for part in parts for name in part))


def _joined_columns(parts: Sequence[Fields[Any]], done: Taken) -> dict[str, Column]:
    """The columns that can be joined without being made; where a part lacks a name or has its values, they are made."""
    joined = {}
    for name in _all_names(parts):
        held = [part.columns().get(name) for part in parts]
        columns = [column for column in held if isinstance(column, Column)]
        if len(columns) == len(parts) and (found := columns[0].join(columns[1:], done)) is not None:
            joined[name] = found
        elif columns:
            for part in parts:
                part[name]
    return joined


def _first_shape(fields: Fields[Any]) -> str:
    name = next(iter(fields), None)
    return f"{fields.rows} rows" + (f" ('{name}' has shape {fields.shape(name)})" if name else "")


def _merge_meta_info(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if key in into and not same(into[key], value):
            raise ValueError(f"meta_info '{key}' differs between batches ({into[key]!r} and {value!r}); pop it first")
        into[key] = value


def _cat(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    for other in tensors[1:]:  # torch.cat would promote types silently
        if other.shape[1:] != first.shape[1:] or other.dtype != first.dtype:
            raise ValueError(
                f"concat: '{name}' has shape {tuple(first.shape)} of {first.dtype} in one batch and "
                f"{tuple(other.shape)} of {other.dtype} in another"
            )
    return torch.cat(tensors)
