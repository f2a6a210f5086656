"""A batch on disk: a folder with `tensors.safetensors` and `fields.json`.

Values come back with their types (protocol_values.py). Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.protocol_fields import ObjectBatch, TensorBatch
from posttrain.protocol_values import Unsavable, from_json, to_json
from posttrain.texts import utf8

FORMAT = 2  # in files without a `format`, of earlier versions, all values are JSON as they stand


def saved_values(objects: Mapping[str, np.ndarray], meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """`non_tensor_batch` and `meta_info` as JSON."""
    return {
        "non_tensor_batch": {
            name: [_saved(value, f"non_tensor_batch['{name}'][{row}]") for row, value in enumerate(array)]
            for name, array in objects.items()
        },
        "meta_info": {name: _saved(value, f"meta_info['{name}']") for name, value in meta_info.items()},
    }


def loaded_values(fields: Mapping[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """(non_tensor_batch, meta_info) of what `saved_values` gave."""
    load = from_json if "format" in fields else lambda value: value
    objects = {name: [load(value) for value in values] for name, values in fields["non_tensor_batch"].items()}
    return objects, {name: load(value) for name, value in fields["meta_info"].items()}


def _saved(value: Any, where: str) -> Any:
    try:
        return to_json(value)
    except Unsavable as error:
        raise TypeError(
            f"{where}{error.inside} is {error.what}, which JSON cannot hold; `pop` it before saving (tensors belong "
            "into `batch`)"
        ) from None


def write_folder(
    folder: Path, rows: int, tensors: TensorBatch, objects: ObjectBatch, meta_info: Mapping[str, Any]
) -> None:
    """TypeError, with the place, for what cannot be saved; nothing is written then."""
    from safetensors.torch import save_file

    fields = {"format": FORMAT, "rows": rows, **saved_values(objects, meta_info)}
    folder.mkdir(parents=True, exist_ok=True)
    # Cloned because safetensors refuses two names for one memory, which a batch may well have.
    save_file(
        {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, folder / "tensors.safetensors"
    )
    (folder / "fields.json").write_bytes(utf8(json.dumps(fields, ensure_ascii=False)))


def read_folder(folder: Path) -> tuple[TensorBatch, ObjectBatch, dict[str, Any]]:
    """(tensors, other fields, facts about the whole) that were written there."""
    from safetensors.torch import load_file

    if not (folder / "fields.json").is_file():
        raise FileNotFoundError(f"{folder} holds no saved DataProto: there is no fields.json in it")
    fields = json.loads((folder / "fields.json").read_text(encoding="utf-8"))
    tensors = TensorBatch(load_file(folder / "tensors.safetensors"), rows=fields["rows"])
    objects, meta_info = loaded_values(fields)
    return tensors, ObjectBatch(objects, rows=fields["rows"]), meta_info
