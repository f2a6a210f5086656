"""TensorDicts that also hold lists of values (one per row), single values, and rows of different length (jagged)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from posttrain.batch.fields import same

# -- one value ---------------------------------------------------------------------------------------------------------


def assign_non_tensor_data(tensor_dict: Any, key: str, val: Any) -> None:
    """Stores one value about the whole."""
    assert isinstance(tensor_dict, TensorDict), f"a TensorDict is needed, not a {type(tensor_dict)}"
    tensor_dict[key] = NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: Any, key: str, val: Sequence[Any]) -> None:
    """Stores one value per row; they may be lists or dicts of any shape."""
    assert isinstance(tensor_dict, TensorDict), f"a TensorDict is needed, not a {type(tensor_dict)}"
    tensor_dict[key] = _stack(val)


def assign_non_tensor(tensor_dict: Any, **kwargs: Any) -> Any:
    """Stores lists by row and everything else as one value."""
    for key, value in kwargs.items():
        if isinstance(value, NonTensorData | NonTensorStack):
            tensor_dict[key] = value
        elif isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def _stack(values: Any) -> Any:
    return NonTensorStack.from_list([NonTensorData(value) for value in values])  # pyright: ignore


def unwrap_non_tensor_data(data: Any) -> Any:
    """The value of a stored value; anything else as it is."""
    return data.data if isinstance(data, NonTensorData) else data


def get_non_tensor_data(data: Any, key: str, default: Any) -> Any:
    return unwrap_non_tensor_data(data.get(key, default))


def get(tensordict: Any, key: str, default: Any = None) -> Any:
    """A tensor, a list (one value per row) or a value."""
    return _plain(tensordict.get(key)) if key in tensordict.keys() else default


def pop(tensordict: Any, key: str, default: Any = None) -> Any:
    """As `get`, and it is gone from the TensorDict."""
    return _plain(tensordict.pop(key)) if key in tensordict.keys() else default


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


# -- making, choosing fields -------------------------------------------------------------------------------------------


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> Any:
    """From tensors and lists with one entry per row, and values about the whole."""
    fields: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for key, value in tensor_dict.items():
        assert isinstance(value, torch.Tensor | list | np.ndarray | NonTensorStack), f"'{key}' is a {type(value)}"
        if isinstance(value, torch.Tensor):
            assert not value.is_nested or value.layout == torch.jagged, f"'{key}' must be jagged (layout=torch.jagged)"
        elif not isinstance(value, NonTensorStack):
            assert not any(isinstance(one, torch.Tensor) for one in value), f"'{key}' is a list of tensors: stack them"
            value = _stack(value)
        fields[key], sizes[key] = value, value.shape[0] if isinstance(value, torch.Tensor) else len(value)
    assert len(set(sizes.values())) <= 1, f"fields differ in their rows: {sizes}"
    for key, value in (non_tensor_dict or {}).items():
        assert key not in fields, f"'{key}' is given twice"
        fields[key] = value if isinstance(value, NonTensorData) else NonTensorData(value)
    return TensorDict(fields, batch_size=[*set(sizes.values())])


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as one TensorDict; tensors of different length become jagged ones."""
    columns = {key: [row[key] for row in list_of_dicts] for key in list_of_dicts[0]}
    return get_tensordict({key: _joined(values) for key, values in columns.items()})


def _joined(values: list[Any]) -> Any:
    if not isinstance(values[0], torch.Tensor):
        return values
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return nested_tensor_from_tensor_list(values)


def get_keys(tensordict: Any, keys: Iterable[str]) -> Any:
    """These fields as a TensorDict of their own."""
    return _chosen(tensordict, keys, tensordict.get)


def pop_keys(tensordict: Any, keys: Iterable[str]) -> Any:
    """As `get_keys`, and they are gone from the first."""
    return _chosen(tensordict, keys, tensordict.pop)


def _chosen(tensordict: Any, keys: Iterable[str], take: Any) -> Any:
    keys = list(keys)
    absent = [key for key in keys if key not in tensordict.keys()]
    if absent:
        raise KeyError(f"no field {absent} in the TensorDict; it has {list(tensordict.keys())}")
    found = {key: take(key) for key in keys}
    single = {key: value for key, value in found.items() if isinstance(value, NonTensorData)}
    return get_tensordict({key: value for key, value in found.items() if key not in single}, single)


def union_tensor_dict(tensor_dict1: Any, tensor_dict2: Any) -> Any:
    """The first with the second's fields; those of both must be equal."""
    sizes = tensor_dict1.batch_size, tensor_dict2.batch_size
    assert sizes[0] == sizes[1], f"{sizes[0]} rows and {sizes[1]} rows cannot be joined"
    for key in tensor_dict2.keys():
        if key in tensor_dict1.keys():
            assert same(get(tensor_dict1, key), get(tensor_dict2, key)), f"'{key}' differs between the two"
        else:
            tensor_dict1[key] = tensor_dict2.get(key)
    return tensor_dict1


def assert_tensordict_eq(tensordict1: Any, tensordict2: Any) -> None:
    """Both have the same fields with the same values."""
    assert set(tensordict1.keys()) == set(tensordict2.keys()), "the two have different fields"
    for key in tensordict1.keys():
        left, right = (_listed(get(one, key)) for one in (tensordict1, tensordict2))
        assert same(left, right), f"'{key}' differs: {left} and {right}"


def _listed(value: Any) -> Any:
    return list(value.unbind()) if isinstance(value, torch.Tensor) and value.is_nested else value


# -- choosing rows -----------------------------------------------------------------------------------------------------


def nested_tensor_from_tensor_list(tensors: list[torch.Tensor], ragged_idx: int | None = None) -> torch.Tensor:
    """Rows of different length as one jagged tensor; `ragged_idx` is the dimension whose length differs (the last)."""
    assert tensors, "at least one row is needed"
    dims = tensors[0].dim()
    ragged_idx = dims if ragged_idx is None else ragged_idx
    assert 1 <= ragged_idx <= dims, f"ragged_idx is {ragged_idx}; rows have {dims} dimensions"
    if dims == 1:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    lengths = torch.tensor([tensor.shape[ragged_idx - 1] for tensor in tensors], device=tensors[0].device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    values = torch.cat(tensors, dim=ragged_idx - 1)
    made = torch.nested.nested_tensor_from_jagged(values, offsets)
    made._ragged_idx = ragged_idx  # pyright: ignore
    return made


def _is_nested(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_nested


def _again(rows: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return nested_tensor_from_tensor_list(list(rows), getattr(like, "_ragged_idx", like.dim() - 1))


def concat_nested_tensors(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all jagged tensors, in order."""
    assert all(tensor.is_nested and tensor.dim() >= 2 for tensor in tensors), "jagged tensors are needed"
    return _again([row for tensor in tensors for row in tensor.unbind()], tensors[0])


def concat_tensordict(data: list[Any]) -> Any:
    """The rows of all, in order. Values about the whole are the first's."""
    assert data, "at least one TensorDict is needed"
    if not data[0].batch_size:
        assert not any(one.batch_size for one in data), "TensorDicts with rows and without cannot be joined"
        return data[0]
    assert len({frozenset(one.keys()) for one in data}) == 1, "the TensorDicts have different fields"
    fields: dict[str, Any] = {}
    single: dict[str, Any] = {}
    for key in data[0].keys():
        values = [one.get(key) for one in data]
        if isinstance(values[0], NonTensorData):
            single[key] = values[0]
        elif isinstance(values[0], NonTensorStack):
            fields[key] = [one for value in values for one in value.tolist()]
        else:
            fields[key] = concat_nested_tensors(values) if _is_nested(values[0]) else torch.cat(values)
    return get_tensordict(fields, single)


def index_select_tensor_dict(batch: Any, indices: torch.Tensor | list[int]) -> Any:
    """These rows."""
    if batch is None:
        return None
    where = torch.as_tensor(indices)
    assert where.dim() == 1, "rows are chosen by a list of numbers"
    chosen = where.tolist()
    fields: dict[str, Any] = {}
    single: dict[str, Any] = {}
    for key in batch.keys():
        value = batch.get(key)
        if isinstance(value, NonTensorData):
            single[key] = value
        elif isinstance(value, NonTensorStack):
            values = value.tolist()
            fields[key] = [values[row] for row in chosen]
        elif value.is_nested:
            rows = value.unbind()
            fields[key] = _again([rows[row] for row in chosen], value)
        else:
            fields[key] = value[where.to(value.device)]
    return get_tensordict(fields, single)


def chunk_tensordict(td: Any, chunks: int) -> list[Any]:
    """This many parts of equal size."""
    assert len(td) % chunks == 0, f"{len(td)} rows cannot be cut into {chunks} equal parts"
    return [index_select_tensor_dict(td, part) for part in torch.arange(len(td)).chunk(chunks)]


def pad_to_divisor(data: Any, size_divisor: int) -> tuple[Any, int]:
    """(rows repeated from the start until `size_divisor` divides them, how many were added)."""
    added = -len(data) % size_divisor
    rows = [row % max(len(data), 1) for row in range(len(data) + added)]
    return (index_select_tensor_dict(data, rows) if added else data), added


def unpad(data: Any, pad_size: int) -> Any:
    """Without the last `pad_size` rows."""
    return index_select_tensor_dict(data, list(range(len(data) - pad_size))) if pad_size else data


def make_iterator(
    tensordict: Any, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: Any = None
) -> Iterator[Any]:
    """Mini-batches, `epochs` times over; `dataloader_kwargs` are torch's."""
    rows = tensordict.batch_size[0]
    assert rows % mini_batch_size == 0, f"{rows} rows are not a multiple of {mini_batch_size}"
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = torch.utils.data.DataLoader(
        range(rows),  # pyright: ignore
        batch_size=mini_batch_size,
        collate_fn=list,
        generator=generator,
        **(dataloader_kwargs or {}),
    )
    return (index_select_tensor_dict(tensordict, part) for _ in range(epochs) for part in loader)


def contiguous(data: Any) -> Any:
    """A new TensorDict whose tensors lie in one piece."""
    fields = {key: data.get(key) for key in data.keys()}
    single = {key: value for key, value in fields.items() if isinstance(value, NonTensorData)}
    rest = {key: value for key, value in fields.items() if key not in single}
    tensors = {key: value.contiguous() if isinstance(value, torch.Tensor) else value for key, value in rest.items()}
    return get_tensordict(tensors, single)
