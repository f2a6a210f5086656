"""DataProto with verl's interface: `batch` is a TensorDict, `non_tensor_batch` a dict of arrays, `meta_info` a dict.

posttrain's own batch is `posttrain.protocol.DataProto`; `verl._rows` turns one into the other without copying.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from posttrain.batch.fields import object_array, row_index, same
from verl import _saved
from verl._tensors import (
    BatchTensors,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
    union_numpy_dict,
    union_tensor_dict,
)
from verl.utils.py_functional import list_of_dict_to_dict_of_list, union_two_dict

__all__ = [
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


class _PaddingSwitch(type):
    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        return cls._enabled or os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = bool(enabled)


class DataProtoConfig(metaclass=_PaddingSwitch):
    """`DataProtoConfig.auto_padding = True` lets `chunk` give parts of unequal size."""


@dataclass
class DataProtoItem:
    """One row: tensors without the first dimension, other fields as values."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataProto:
    """A batch of rows. `batch` is None where there are no tensors."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.check_consistency()

    def __getstate__(self) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[Any, dict[str, Any], dict[str, Any]]) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = state

    def check_consistency(self) -> None:
        """All parts have the same number of rows, and arrays are arrays."""
        assert self.batch is None or len(self.batch.batch_size) == 1, "a DataProto has one dimension of rows"
        for name, values in self.non_tensor_batch.items():
            assert isinstance(values, np.ndarray), f"non_tensor_batch['{name}'] is a {type(values)}, not an array"
            assert len(values) == len(self), f"non_tensor_batch['{name}'] has {len(values)} rows of {len(self)}"

    # Making one

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """From named tensors and named arrays (or lists) that share their first dimension."""
        assert num_batch_dims > 0, "num_batch_dims must be above 0"
        assert num_batch_dims == 1 or not non_tensors, "arrays beside tensors need num_batch_dims=1"
        sizes = {name: tensor.shape[:num_batch_dims] for name, tensor in (tensors or {}).items()}
        assert len(set(sizes.values())) <= 1, f"tensors differ in their rows: {sizes}"
        fields = {
            name: value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
            for name, value in (non_tensors or {}).items()
        }
        facts = {} if meta_info is None else meta_info
        if auto_padding:
            facts[DataProtoConfig.auto_padding_key] = True
        batch = BatchTensors(dict(tensors), batch_size=next(iter(sizes.values()))) if tensors else None
        return cls(batch=batch, non_tensor_batch=fields, meta_info=facts)

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> DataProto:
        """From one dict of tensors and arrays."""
        for name, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(f"'{name}' is a {type(value)}: a DataProto is made of tensors and arrays")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {name: value for name, value in data.items() if name not in tensors}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: Any = None, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> DataProto:
        """From a TensorDict: its tensors, its stacks of other values (arrays) and its single values (meta_info)."""
        tensors, fields, facts = {}, {}, {} if meta_info is None else meta_info
        for name in tensor_dict.keys():
            value = tensor_dict.get(name)
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, NonTensorStack):
                fields[name] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                facts[name] = value.data
        size = next((value.shape[:num_batch_dims] for value in tensors.values()), tensor_dict.batch_size)
        return cls(TensorDict(tensors, batch_size=size), fields, facts)

    def to_tensordict(self) -> Any:
        """One TensorDict with everything: arrays become stacks of values, `meta_info` single values."""
        from verl.utils.tensordict_utils import get_tensordict

        shared = set(self.batch.keys()) & set(self.non_tensor_batch)
        assert not shared, f"both tensors and arrays are called {shared}"
        stacks = {name: list(values) for name, values in self.non_tensor_batch.items()}
        return get_tensordict({**dict(self.batch.items()), **stacks}, non_tensor_dict=self.meta_info)

    # Looking at it

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()))) if self.non_tensor_batch else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name; empty where there is no `batch`."""
        return {} if self.batch is None else dict(self.batch.items())

    def get_data_info(self) -> str:
        """Names, shapes and kinds of everything, a line each."""
        tensors = [f"  {name}: {tuple(t.shape)} ({t.dtype}) {t.device}" for name, t in self.tensors().items()]
        arrays = [f"  {name}: ndarray{a.shape} ({a.dtype})" for name, a in self.non_tensor_batch.items()]
        facts = [f"  {name}: {type(value).__name__}" for name, value in self.meta_info.items()]
        return "\n".join(["batch", *tensors, "non_tensor_batch", *arrays, "meta_info", *facts])

    def print_size(self, prefix: str = "") -> None:
        tensors = sum(t.element_size() * t.numel() for t in self.tensors().values()) / 1024**3
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values()) / 1024**3
        words = f"Size of tensordict: {tensors} GB, size of non_tensor_batch: {arrays} GB"
        print(f"{prefix}, {words}" if prefix else words)

    # Choosing rows

    def __getitem__(self, item: Any) -> Any:
        """A `DataProtoItem` for a number; a DataProto for a slice, list, array or tensor of numbers, or a mask."""
        if isinstance(item, slice):
            return self._rows(item)
        if isinstance(item, list | np.ndarray | torch.Tensor):
            return self.select_idxs(item)
        if isinstance(item, int | np.integer):
            row = {name: values[item] for name, values in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[int(item)], row, self.meta_info)
        raise TypeError(f"rows are not chosen by a {type(item)}")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        return self._rows(slice(start, end, step))

    def select_idxs(self, idxs: Any) -> DataProto:
        """These rows, by number or by a mask."""
        return self._rows(row_index(idxs, len(self)))

    def _rows(self, where: Any) -> DataProto:
        positions = where if isinstance(where, slice) else where.cpu().numpy()
        fields = {name: values[positions] for name, values in self.non_tensor_batch.items()}
        return type(self)(None if self.batch is None else self.batch[where], fields, self.meta_info)

    def reorder(self, indices: torch.Tensor) -> None:
        """Other order of rows, in place."""
        moved = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row so many times: a,a,b,b if interleaved, else a,b,a,b."""
        rows = torch.arange(len(self))
        return self._rows(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Any) -> DataProto:
        """Each row as often as `repeat_times` says of it."""
        return self._rows(torch.arange(len(self)).repeat_interleave(torch.as_tensor(repeat_times)))

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of this size; the last may be smaller."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """This many parts, of equal size unless padding is enabled."""
        if not self.is_padding_enabled():
            assert len(self) % chunks == 0, f"{len(self)} rows cannot be cut into {chunks} equal parts"
        size = -(-len(self) // chunks) if self.batch is not None else 0
        ends = [min(size * part, len(self)) for part in range(1, chunks + 1)] if size else []
        if not size:  # arrays alone are cut as numpy does: the first parts one longer
            ends = np.cumsum([len(part) for part in np.array_split(np.arange(len(self)), chunks)]).tolist()
        return [self[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def is_padding_enabled(self) -> bool:
        return bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False) or DataProtoConfig.auto_padding)

    def padding(self, padding_size: int, padding_candidate: str = "") -> None:
        """Appends copies of the first row (`first`) or of the last, in place."""
        if padding_size:
            copied = 0 if padding_candidate == "first" else len(self) - 1
            moved = self.select_idxs([*range(len(self)), *[copied] * padding_size])
            self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch

    def unfold_column_chunks(self, n_split: int, split_keys: list[str] | None = None) -> DataProto:
        """Cuts the columns of `split_keys` into `n_split` parts that become rows; other fields are repeated."""
        keys = split_keys or []
        repeated = self.repeat(n_split, interleave=True)
        for name in keys:
            own = self.batch if self.batch is not None and name in self.batch.keys() else self.non_tensor_batch
            if name in own.keys():
                shape = own[name].shape
                cut = own[name].reshape(shape[0] * n_split, shape[1] // n_split, *shape[2:])
                (repeated.batch if own is self.batch else repeated.non_tensor_batch)[name] = cut
        return repeated

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches, `epochs` times over; `dataloader_kwargs` are torch's (`shuffle`, `drop_last`, ...)."""
        assert len(self) % mini_batch_size == 0, f"{len(self)} rows are not a multiple of {mini_batch_size}"
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader = torch.utils.data.DataLoader(
            range(len(self)),  # pyright: ignore
            batch_size=mini_batch_size,
            collate_fn=list,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)

    @staticmethod
    def concat(data: list[DataProto]) -> DataProto:
        """The rows of all, in order. `metrics` in meta_info become lists by name; other facts must be equal."""
        batch = torch.cat([part.batch for part in data], dim=0) if data[0].batch is not None else None  # pyright: ignore
        columns = list_of_dict_to_dict_of_list([part.non_tensor_batch for part in data])
        facts: dict[str, Any] = {}
        metrics: list[dict[str, Any]] = []
        for part in data:
            for name, value in part.meta_info.items():
                if name == "metrics":
                    metrics += [] if value is None else value if isinstance(value, list) else [value]
                    continue
                assert name not in facts or same(facts[name], value), f"Conflicting values for meta_info key '{name}'"
                facts[name] = value
        if metrics:
            facts["metrics"] = list_of_dict_to_dict_of_list(metrics)
        return type(data[0])(batch, {name: np.concatenate(values) for name, values in columns.items()}, facts)

    # Choosing fields

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Only these fields (None: all of that kind); tensors are shared."""
        batch = self.batch if batch_keys is None else self.batch.select(*batch_keys)
        fields, facts = (
            {name: value for name, value in own.items() if names is None or name in names}
            for own, names in ((self.non_tensor_batch, non_tensor_batch_keys), (self.meta_info, meta_info_keys))
        )
        if deepcopy:
            fields, facts = copy.deepcopy(fields), copy.deepcopy(facts)
        return type(self)(batch, fields, facts)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Takes these fields out and gives them as a batch of their own."""
        homes = (
            (self.batch, batch_keys),
            (self.non_tensor_batch, non_tensor_batch_keys),
            (self.meta_info, meta_info_keys),
        )
        for home, names in homes:
            for name in names or ():
                assert name in home.keys(), f"there is no field '{name}' to pop; there are {list(home.keys())}"
        taken = [{name: home.pop(name) for name in names or ()} for home, names in homes]
        return DataProto.from_dict(taken[0], taken[1], taken[2])

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Renames tensors, in place."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, str | list):
                raise TypeError(f"keys must be a list or a string, not a {type(keys)}")
        old, new = ([keys] if isinstance(keys, str) else list(keys or []) for keys in (old_keys, new_keys))
        if len(old) != len(new):
            raise ValueError(f"{len(old)} old names and {len(new)} new ones")
        for before, after in zip(old, new, strict=True):
            self.batch.rename_key_(before, after)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the other's fields in place; what both have must be equal."""
        self.batch = union_tensor_dict(self.batch, other.batch)
        self.non_tensor_batch = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = union_two_dict(self.meta_info, other.meta_info)
        return self

    def to(self, device: Any) -> DataProto:
        """Moves the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # Disk

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Writes one file of tensors and JSON, not a pickle; what JSON cannot hold is an error."""
        _saved.save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Reads what `save_to_disk` of this class wrote. verl's own files are pickles, which could run anything."""
        return DataProto(*_saved.load(filepath))


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(the batch with rows repeated from its start until `size_divisor` divides them, how many were added)."""
    assert isinstance(data, DataProto), "data must be a DataProto"
    added = -len(data) % size_divisor
    return (data.select_idxs([row % len(data) for row in range(len(data) + added)]) if added else data), added


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    return data[:-pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """(rows, ...) as (new_batch_size, rows / new_batch_size, ...)."""
    assert len(data) % new_batch_size == 0, f"{len(data)} rows cannot be folded into {new_batch_size}"
    tensors = {name: t.unflatten(0, (new_batch_size, -1)) for name, t in data.tensors().items()}
    fields = {name: a.reshape(new_batch_size, -1, *a.shape[1:]) for name, a in data.non_tensor_batch.items()}
    batch = BatchTensors(tensors, batch_size=[new_batch_size]) if tensors else None
    return type(data)(batch, fields, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dimensions as rows: undoes `fold_batch_dim`."""
    tensors = {name: t.flatten(0, batch_dims - 1) for name, t in data.tensors().items()}
    fields = {name: a.reshape(-1, *a.shape[batch_dims:]) for name, a in data.non_tensor_batch.items()}
    rows = next((len(values) for values in [*tensors.values(), *fields.values()]), 0)
    return type(data)(BatchTensors(tensors, batch_size=[rows]) if tensors else None, fields, data.meta_info)


def collate_fn(x: list[DataProtoItem]) -> DataProto:
    """Rows as a batch."""
    batch = torch.stack([item.batch for item in x]).contiguous()
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in x])
    return DataProto(batch, {name: object_array(values) for name, values in columns.items()})


@dataclass
class DataProtoFuture:
    """The batch that ranks of a worker group are computing; `get` waits for it and joins their parts."""

    collect_fn: Any
    futures: list[Any]
    dispatch_fn: Any = None

    @staticmethod
    def concat(data: list[Any]) -> DataProtoFuture:
        return DataProtoFuture(DataProto.concat, data)

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        return [
            DataProtoFuture(self.collect_fn, self.futures, lambda whole, part=part: whole.chunk(chunks)[part])
            for part in range(chunks)
        ]

    def get(self) -> Any:
        import ray

        whole = self.collect_fn(ray.get(self.futures))
        return whole if self.dispatch_fn is None else self.dispatch_fn(whole)
