"""Tensors of a batch: read by the names that guides to verl use too (`log_probs`, `ref_log_probs`), joined, and encoded
as bytes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from posttrain.batch.fields import OTHER_SPELLINGS, same


class BatchTensors(TensorDict):
    """A TensorDict. A tensor that is stored under the other name itself is found under that name."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(self._stored(index))

    def get(self, key: Any, *args: Any, **named: Any) -> Any:
        return super().get(self._stored(key), *args, **named)

    def _stored(self, index: Any) -> Any:
        other = OTHER_SPELLINGS.get(index) if isinstance(index, str) else None
        return other if other is not None and index not in self.keys() and other in self.keys() else index


def union_tensor_dict(tensor_dict1: Any, tensor_dict2: Any) -> Any:
    """The first with the second's tensors; those of both must be equal."""
    if tensor_dict1 is None or tensor_dict2 is None:
        return tensor_dict2 if tensor_dict1 is None else tensor_dict1
    assert tensor_dict1.batch_size == tensor_dict2.batch_size, (
        f"{tensor_dict1.batch_size} rows and {tensor_dict2.batch_size} rows cannot be joined"
    )
    for name in tensor_dict2.keys():
        if name in tensor_dict1.keys():
            assert tensor_dict1[name].equal(tensor_dict2[name]), (
                f"{name} in tensor_dict1 and tensor_dict2 are not the same object"
            )
        else:
            tensor_dict1[name] = tensor_dict2[name]
    return tensor_dict1


def union_numpy_dict(tensor_dict1: dict[str, Any], tensor_dict2: dict[str, Any]) -> dict[str, Any]:
    """The first with the second's arrays; those of both must be equal, NaN to NaN."""
    for name, values in tensor_dict2.items():
        assert name not in tensor_dict1 or same(tensor_dict1[name], values), (
            f"`{name}` in tensor_dict1 and tensor_dict2 are not the same object."
        )
        tensor_dict1[name] = values
    return tensor_dict1


def serialize_single_tensor(obj: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """(name of the type, shape, bytes) of a tensor on any device."""
    flat = obj.detach().cpu().contiguous().flatten()
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), flat.view(torch.uint8).numpy().data


def deserialize_single_tensor(arr: Any) -> torch.Tensor:
    """The tensor that `serialize_single_tensor` gave as (name of the type, shape, bytes)."""
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    assert isinstance(dtype, torch.dtype), f"torch has no type {name}"
    buffer = bytearray(data)
    if not buffer:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


def serialize_tensordict(batch: Any) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """(batch size, device, encoded tensors); a nested tensor is (layout, its parts)."""
    encoded: dict[str, Any] = {}
    for name, value in batch.items():
        if not value.is_nested:
            encoded[name] = serialize_single_tensor(value)
        else:
            encoded[name] = (
                str(value.layout).removeprefix("torch."),
                [serialize_single_tensor(v) for v in value.unbind()],
            )
    return tuple(batch.batch_size), None if batch.device is None else str(batch.device), encoded


def deserialize_tensordict(arr: Any) -> Any:
    """The TensorDict that `serialize_tensordict` gave."""
    batch_size, device, encoded = arr
    tensors: dict[str, Any] = {}
    for name, value in encoded.items():
        if len(value) == 3:
            tensors[name] = deserialize_single_tensor(value)
        elif len(value) == 2:
            layout = getattr(torch, value[0])
            tensors[name] = torch.nested.as_nested_tensor(
                [deserialize_single_tensor(v) for v in value[1]], layout=layout
            )
        else:
            raise ValueError(f"Invalid tensor encoding format, expected length 2 or 3, got {len(value)}")
    return TensorDict(tensors, batch_size=batch_size, device=device)
