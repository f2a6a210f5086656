"""A batch on disk: a folder with `tensors.safetensors` and `fields.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.protocol_fields import ObjectBatch, TensorBatch, json_ready
from posttrain.texts import utf8


def write_folder(
    folder: Path, rows: int, tensors: TensorBatch, objects: ObjectBatch, meta_info: Mapping[str, Any]
) -> None:
    """TypeError, with the place, for what JSON cannot hold; nothing is written then."""
    from safetensors.torch import save_file

    fields = {
        "rows": rows,
        "non_tensor_batch": {
            name: [json_ready(value, f"non_tensor_batch['{name}'][{row}]") for row, value in enumerate(array)]
            for name, array in objects.items()
        },
        "meta_info": {name: json_ready(value, f"meta_info['{name}']") for name, value in meta_info.items()},
    }
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
    return tensors, ObjectBatch(fields["non_tensor_batch"], rows=fields["rows"]), fields["meta_info"]
