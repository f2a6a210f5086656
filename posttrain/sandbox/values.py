"""Python values as JSON and back, so that nothing but plain data crosses between a program and those who judge it.

Subclasses lose what they add: a list whose `==` always says yes arrives as the list that it holds. What is no plain
data is handed to `unknown`, which may refuse it or put a reference in its place.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

_BIG = 10**1000  # json refuses integers of more digits than Python prints
_DTYPE = re.compile(r"[<>|=]?[biufcUS]\d*")
_SEQUENCES: tuple[tuple[str, type], ...] = (
    ("tuple", tuple),
    ("set", set),
    ("frozenset", frozenset),
    ("deque", deque),
    ("keys", type({}.keys())),
    ("values", type({}.values())),
    ("items", type({}.items())),
)
_MAPPINGS: tuple[tuple[str, type], ...] = (("counter", Counter), ("ordered", OrderedDict))
_TIMES: tuple[tuple[str, type], ...] = (("datetime", datetime), ("date", date), ("time", time))


def refuse(value: Any) -> Any:
    """For `unknown`: plain data only."""
    raise TypeError(f"{type(value).__name__} is no plain data")


def encode(value: Any, unknown: Callable[[Any], Any] = refuse) -> Any:
    """A value as JSON types; other types than None, bool, int, float, str and list as `{tag: content}`."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__add__(value, 0) if -_BIG < int.__add__(value, 0) < _BIG else {"int": hex(int.__add__(value, 0))}
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, list):
        return [encode(one, unknown) for one in list.__iter__(value)]
    if isinstance(value, dict):
        tag = next((tag for tag, kind in _MAPPINGS if isinstance(value, kind)), "dict")
        return {tag: [[encode(key, unknown), encode(one, unknown)] for key, one in dict.items(value)]}
    for tag, kind in _SEQUENCES:
        if isinstance(value, kind):
            return {tag: [encode(one, unknown) for one in kind.__iter__(value)]}
    return _encode_rarer(value, unknown)


def _encode_rarer(value: Any, unknown: Callable[[Any], Any]) -> Any:
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, Fraction):
        return {"fraction": [encode(value.numerator), encode(value.denominator)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for tag, kind in _TIMES:
        if isinstance(value, kind):
            return {tag: value.isoformat()}
    if isinstance(value, timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, encode(value.tolist())]}
    if numpy is not None and isinstance(value, numpy.generic):
        return encode(value.item(), refuse)
    return unknown(value)


def by_place(args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by what both sides call them."""
    return {str(place): arg for place, arg in enumerate(args)} | {f"={name}": arg for name, arg in options.items()}


def no_reference(tag: str, content: Any) -> Any:
    """For `special`: a reader that knows no references."""
    raise ValueError(f"unknown tag {tag!r}")


def decode(data: Any, special: Callable[[str, Any], Any] = no_reference) -> Any:
    """The value that was encoded; tags that are not ours go to `special`."""
    if isinstance(data, list):
        return [decode(one, special) for one in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError("no encoded value")
    tag, content = next(iter(data.items()))
    if tag in _PAIRS:
        return _PAIRS[tag]({decode(key, special): decode(one, special) for key, one in content})
    if tag in _ITEMS:
        return _ITEMS[tag]([decode(one, special) for one in content])
    if tag in _SIMPLE:
        return _SIMPLE[tag](content)
    return special(tag, content)


def _array(content: Any) -> Any:
    import numpy

    dtype, values = content
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r}")
    return numpy.array(decode(values), dtype=dtype)


_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "counter": Counter, "ordered": OrderedDict}
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "values": lambda items: dict(enumerate(items)).values(),
    "items": lambda items: dict(items).items(),
}
_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda content: complex(*content),
    "decimal": Decimal,
    "fraction": lambda content: Fraction(*map(decode, content)),
    "range": lambda content: range(*content),
    "array": _array,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda content: timedelta(*content),
}
