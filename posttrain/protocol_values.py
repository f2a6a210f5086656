"""Values of a batch as JSON and back, bit for bit and with their types: what rows of data and rewards may hold.

Texts, numbers, booleans, None, lists, and dicts with text keys are JSON as they stand. Every other value is an object
with the key `TAG`: `{"$type": "bytes", "value": "AP8="}`. A dict of the user's that has this key, or keys that are no
texts, is tagged itself, so no value can be mistaken for a tag. Reading builds values of the types below and nothing
else: a file cannot make it import or run anything, as a pickle could.

Never imports torch.
"""

from __future__ import annotations

import base64
import datetime
import uuid
import zoneinfo
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np

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


class _Way(NamedTuple):
    """How values of one type are saved: as JSON, and back."""

    type: type
    save: Callable[[Any], Any]
    load: Callable[[Any], Any]


def to_json(value: Any) -> Any:
    """The value as JSON holds it, or `Unsavable`.

    Subclasses of texts, numbers, lists, tuples and dicts are saved as what they derive from.
    """
    kind = type(value)
    if value is None or kind is str or kind is float or kind is bool:
        return value
    if kind is int:
        return value if -_JSON_INTEGERS <= value < _JSON_INTEGERS else {TAG: "int", "value": hex(value)}
    if kind is list:
        return _list(value)
    if kind is dict:
        return _dict(value)
    if (name := _NAMES.get(kind)) is not None:
        return {TAG: name, "value": _WAYS[name].save(value)}
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
    return _WAYS[value[TAG]].load(value["value"])


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


_WAYS: dict[str, _Way] = {
    "int": _Way(int, hex, lambda saved: int(saved, 16)),
    "dict": _Way(dict, _dict, lambda saved: {from_json(key): from_json(item) for key, item in saved}),
    "tuple": _Way(tuple, _list, lambda saved: tuple(from_json(saved))),
    "set": _Way(set, _list, lambda saved: set(from_json(saved))),
    "frozenset": _Way(frozenset, _list, lambda saved: frozenset(from_json(saved))),
    "bytes": _Way(bytes, _to_base64, base64.b64decode),
    "bytearray": _Way(bytearray, _to_base64, lambda saved: bytearray(base64.b64decode(saved))),
    "complex": _Way(complex, lambda value: [value.real, value.imag], lambda saved: complex(*saved)),
    "Decimal": _Way(Decimal, str, Decimal),
    "UUID": _Way(uuid.UUID, str, uuid.UUID),
    "datetime": _Way(datetime.datetime, _moment, lambda saved: _moment_back(datetime.datetime, saved)),
    "date": _Way(datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": _Way(datetime.time, _moment, lambda saved: _moment_back(datetime.time, saved)),
    "timedelta": _Way(datetime.timedelta, _duration, _duration_back),
    "array": _Way(np.ndarray, _array, _array_back),
    "numpy": _Way(np.generic, lambda value: _array(np.asarray(value)), lambda saved: _array_back(saved)[()]),
}
_NAMES = {way.type: name for name, way in _WAYS.items()}
