"""A batch on disk: a folder with `tensors.safetensors` and `fields.json`. Values keep their types, bit-for-bit.

Fields that hold an array of numbers for each row, such as routes of experts, are among the tensors, end to end.

Texts, numbers, booleans, None, lists, and dicts with text keys are JSON as they stand. Every other value is an object
with the key `TAG`: `{"$type": "bytes", "value": "AP8="}`. A dict of the user's that has this key, or keys that are no
texts, is tagged itself, so no value can be mistaken for a tag. Reading builds values of the types below and nothing
else: a file cannot make it import or run anything, as a pickle could.

Imports torch only to write or read a folder: data sets check their rows with `to_json` before torch is loaded.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.texts import utf8

if TYPE_CHECKING:
    from posttrain.batch.fields import ObjectBatch, TensorBatch

TAG = "$type"
# Integers from here on are saved as hexadecimal digits: Python limits how long a decimal number it reads.
_JSON_INTEGERS = 2**63
_ARRAY_KINDS = "biufcSUmM"  # kinds of numpy arrays whose bytes are their value: numbers, texts, dates and durations


class Unsavable(TypeError):
    """A value of a type that cannot be saved. `inside` is its place in the value that was given, such as `['a'][0]`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.inside = what, ""

    def within(self, place: str) -> Unsavable:
        self.inside = place + self.inside
        return self


class _Codec(NamedTuple):
    """How values of one type are saved: as JSON, and back."""

    type: type
    save: Callable[[Any], Any]
    load: Callable[[Any], Any]


def to_json(value: Any) -> Any:
    """The value as JSON holds it, or `Unsavable`.

    Subclasses of texts, numbers, lists, tuples and dicts are saved as what they derive from.
    """
    kind = type(value)  # exact types: a bool is an int, too, and a subclass may hold more than its base
    if value is None or kind is str or kind is float or kind is bool:
        return value
    if kind is int:
        return value if -_JSON_INTEGERS <= value < _JSON_INTEGERS else {TAG: "int", "value": hex(value)}
    if kind is list:
        return _list(value)
    if kind is dict:
        return _dict(value)
    if (name := _NAMES.get(kind)) is not None:
        return {TAG: name, "value": _CODECS[name].save(value)}
    if isinstance(value, np.generic):  # before `float` and `str`, from which some of these derive
        return {TAG: "numpy", "value": _array(np.asarray(value))}
    plain: tuple[Any, ...] = (str, int, float, list, tuple, dict)
    for base in plain:
        if isinstance(value, base):
            return to_json(base(value))
    raise Unsavable(f"a {kind.__name__}")


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: from_json(item) for key, item in value.items()}
    return _CODECS[value[TAG]].load(value["value"])


def _list(values: Iterable[Any]) -> list[Any]:
    saved: list[Any] = []
    try:
        for value in values:
            saved.append(to_json(value))
    except Unsavable as error:
        raise error.within(f"[{len(saved)}]") from None
    return saved


def _dict(values: dict[Any, Any]) -> dict[str, Any]:
    key = None
    try:
        if TAG not in values and all(type(name) is str for name in values):
            return {(key := name): to_json(item) for name, item in values.items()}
        return {TAG: "dict", "value": [[to_json(key := name), to_json(item)] for name, item in values.items()]}
    except Unsavable as error:
        raise error.within(f"[{key!r}]") from None


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(array: np.ndarray) -> dict[str, Any]:
    if array.dtype.kind == "O":
        return {"shape": list(array.shape), "items": _list(array.ravel().tolist())}
    if array.dtype.kind not in _ARRAY_KINDS:
        raise Unsavable(f"a numpy value of type {array.dtype}")
    return {"shape": list(array.shape), "dtype": array.dtype.str, "bytes": _to_base64(array.tobytes())}


def _array_back(saved: dict[str, Any]) -> np.ndarray:
    if "items" in saved:
        array = np.empty(len(saved["items"]), dtype=object)
        for i, item in enumerate(saved["items"]):
            array[i] = from_json(item)
    else:  # copied, because an array over the bytes cannot be written to
        array = np.frombuffer(base64.b64decode(saved["bytes"]), dtype=np.dtype(saved["dtype"])).copy()
    return array.reshape(saved["shape"])


def _moment(value: datetime.datetime | datetime.time) -> list[Any]:
    """[its text without a zone, which of two moments with this text it is, its zone]"""
    return [value.replace(tzinfo=None).isoformat(), value.fold, _zone(value.tzinfo)]


def _moment_back(kind: Any, saved: list[Any]) -> Any:
    text, fold, zone = saved
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=_zone_back(zone))


def _zone(zone: datetime.tzinfo | None) -> Any:
    """None, the key of a zone with a name, or [offset, name] of a fixed one."""
    if zone is None:
        return None
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return zone.key
    if type(zone) is datetime.timezone:
        offset, name = zone.utcoffset(None), zone.tzname(None)
        return [_duration(offset), None if name == datetime.timezone(offset).tzname(None) else name]
    raise Unsavable(f"a time with a zone of type {type(zone).__name__}")


def _zone_back(saved: Any) -> datetime.tzinfo | None:
    if saved is None:
        return None
    if isinstance(saved, str):
        return zoneinfo.ZoneInfo(saved)
    offset, name = saved
    return datetime.timezone(_duration_back(offset), *([] if name is None else [name]))


def _duration(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _duration_back(saved: list[int]) -> datetime.timedelta:
    return datetime.timedelta(*saved)


_CODECS: dict[str, _Codec] = {
    "int": _Codec(int, hex, lambda saved: int(saved, 16)),
    "dict": _Codec(dict, _dict, lambda saved: {from_json(key): from_json(item) for key, item in saved}),
    "tuple": _Codec(tuple, _list, lambda saved: tuple(from_json(saved))),
    "set": _Codec(set, _list, lambda saved: set(from_json(saved))),
    "frozenset": _Codec(frozenset, _list, lambda saved: frozenset(from_json(saved))),
    "bytes": _Codec(bytes, _to_base64, base64.b64decode),
    "bytearray": _Codec(bytearray, _to_base64, lambda saved: bytearray(base64.b64decode(saved))),
    "complex": _Codec(complex, lambda value: [value.real, value.imag], lambda saved: complex(*saved)),
    "Decimal": _Codec(Decimal, str, Decimal),
    "UUID": _Codec(uuid.UUID, str, uuid.UUID),
    "datetime": _Codec(datetime.datetime, _moment, lambda saved: _moment_back(datetime.datetime, saved)),
    "date": _Codec(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": _Codec(datetime.time, _moment, lambda saved: _moment_back(datetime.time, saved)),
    "timedelta": _Codec(datetime.timedelta, _duration, _duration_back),
    "array": _Codec(np.ndarray, _array, _array_back),
    "numpy": _Codec(np.generic, lambda value: _array(np.asarray(value)), lambda saved: _array_back(saved)[()]),
}
_NAMES = {codec.type: name for name, codec in _CODECS.items()}


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


ARRAYS = "arrays."  # prefix of the tensors that hold such fields
_IN_TENSORS = {np.dtype(kind) for kind in (np.uint8, np.int16, np.int32, np.int64, np.float32, np.float64)}


def _holds_arrays(column: np.ndarray) -> bool:
    kinds = {value.dtype if type(value) is np.ndarray else None for value in column}
    return len(kinds) == 1 and kinds <= _IN_TENSORS


def write_folder(
    folder: Path, rows: int, tensors: TensorBatch, objects: ObjectBatch, meta_info: Mapping[str, Any]
) -> None:
    """TypeError, with the place, for what cannot be saved; nothing is written then."""
    import torch
    from safetensors.torch import save_file

    # Made before anything is written: a value that cannot be saved leaves no half-written folder.
    arrays = {name: list(column) for name, column in objects.items() if _holds_arrays(column)}
    others = {name: column for name, column in objects.items() if name not in arrays}
    shapes = {name: [list(value.shape) for value in values] for name, values in arrays.items()}
    fields = {
        "format": FORMAT,
        "rows": rows,
        **saved_values(others, meta_info),
        **({"arrays": shapes} if shapes else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # Cloned because safetensors rejects two names for one memory, which a batch may have.
    saved = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    for name, values in arrays.items():
        saved[f"{ARRAYS}{name}"] = torch.from_numpy(np.concatenate([value.ravel() for value in values]))
    save_file(saved, folder / "tensors.safetensors")
    (folder / "fields.json").write_bytes(utf8(json.dumps(fields, ensure_ascii=False)))


def read_folder(folder: Path) -> tuple[TensorBatch, ObjectBatch, dict[str, Any]]:
    """(tensors, other fields, facts about the whole) that were written there."""
    from safetensors.torch import load_file

    from posttrain.batch.fields import ObjectBatch, TensorBatch

    if not (folder / "fields.json").is_file():
        raise FileNotFoundError(f"{folder} holds no saved DataProto: there is no fields.json in it")
    fields = json.loads((folder / "fields.json").read_text(encoding="utf-8"))
    saved = load_file(folder / "tensors.safetensors")
    objects, meta_info = loaded_values(fields)
    for name, shapes in fields.get("arrays", {}).items():
        parts = np.split(saved.pop(f"{ARRAYS}{name}").numpy(), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
        objects[name] = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    tensors = TensorBatch(saved, rows=fields["rows"])
    return tensors, ObjectBatch(objects, rows=fields["rows"]), meta_info
