"""A DataProto in one file: safetensors, whose header holds the other values as JSON. Loading it runs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from posttrain.batch.fields import object_array
from posttrain.batch.saving import FORMAT, loaded_values, saved_values

_PICKLES = (b"\x80", b"PK")  # pickle's first byte, and the zip that torch.save writes
_ARRAY = "array:"


def save(data: Any, path: str | os.PathLike[str]) -> None:
    """Write a batch; a value of a type that cannot be saved is an error that names it."""
    from safetensors.torch import save_file

    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in data.tensors().items()}
    objects = {}
    for name, values in data.non_tensor_batch.items():
        if values.dtype.kind in "biuf":
            tensors[_ARRAY + name] = torch.from_numpy(np.ascontiguousarray(values))
        else:
            objects[name] = values
    fields = {
        "format": FORMAT,
        **saved_values(objects, data.meta_info),
        "rows": len(data),
        "has_batch": data.batch is not None,
    }
    save_file(tensors, Path(path), metadata={"verl.DataProto": json.dumps(fields)})


def load(path: str | os.PathLike[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """(batch, non_tensor_batch, meta_info) of a file that `save` wrote."""
    from safetensors import safe_open

    with open(path, "rb") as file:
        if file.read(2).startswith(_PICKLES):
            raise ValueError(
                f"{path} is a pickle, as verl's own save_to_disk writes: loading one can run any program, so it is not "
                "loaded here. If you trust it, load it with verl and give what it holds to DataProto.from_dict."
            )
    with safe_open(Path(path), framework="pt") as file:
        fields = json.loads((file.metadata() or {}).get("verl.DataProto", "null"))
        if fields is None:
            raise ValueError(f"{path} holds tensors, but no DataProto: it was not written by DataProto.save_to_disk")
        found = {name: file.get_tensor(name) for name in list(file.keys())}
    arrays = {name.removeprefix(_ARRAY): t.numpy() for name, t in found.items() if name.startswith(_ARRAY)}
    objects, meta_info = loaded_values(fields)
    arrays |= {name: object_array(values) for name, values in objects.items()}
    tensors = {name: tensor for name, tensor in found.items() if not name.startswith(_ARRAY)}
    batch = TensorDict(tensors, batch_size=[fields["rows"]]) if fields["has_batch"] else None
    return batch, arrays, meta_info
