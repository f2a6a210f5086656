"""What travels between processes: a pickle beside the numbers of its tensors and arrays, which are not copied into it.

Ray moves arrays without pickling them, and tensors only through their pickle, several times slower; so tensors travel
as arrays. What arrives is private: it can be changed without changing what the sender, the store or another receiver
holds.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import torch

Parcel = tuple[bytes, list[np.ndarray]]
_AS_INTEGERS = {torch.bfloat16: torch.int16}  # what numpy has no name for


def pack(value: Any) -> Parcel:
    """(its pickle, the arrays that the pickle leaves out); the arrays share memory with `value`."""
    buffers: list[np.ndarray] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(_bytes_of(buffer))).dump(value)
    return stream.getvalue(), buffers


def unpack(parcel: Parcel) -> Any:
    """The value again, with arrays and tensors of its own."""
    pickled, buffers = parcel
    # Copied: Ray's store hands out read-only memory, and torch must not write into what another rank reads.
    return pickle.loads(pickled, buffers=[bytearray(buffer.data) for buffer in buffers])


def _bytes_of(buffer: pickle.PickleBuffer) -> np.ndarray:
    return np.frombuffer(buffer.raw(), np.uint8)


class _Pickler(cloudpickle.Pickler):
    """Knows functions and classes of scripts and notebooks, and tensors as arrays."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor:  # parameters and other subclasses keep their own way of pickling
            return _tensor, (_array(obj.detach()), obj.dtype)
        return super().reducer_override(obj)


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu().contiguous()
    return tensor.view(_AS_INTEGERS.get(tensor.dtype, tensor.dtype)).numpy()


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype)
