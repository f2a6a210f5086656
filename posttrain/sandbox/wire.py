"""What travels between the processes of a sandbox: messages, which are JSON preceded by its length, and values in them.

Both processes of a test rebuild values from content, never from code. A subclass of one of these types is encoded as
its content, unless `held` adds to it. Other objects are passed to `unknown`, which may reject them or return a
reference. Containers that can change are passed to `shared`, if given, with a function that returns their content.
"""

from __future__ import annotations

import json
import operator
import os
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from posttrain.sandbox.table_reader import empty_table
from posttrain.sandbox.tables import Snapshot, UnsupportedTable, assign_table, is_changeable, write

_BIG = 10**1000  # json rejects integers with more digits than Python prints
_DTYPE = re.compile(r"[<>|=]?[biufcUS]\d*")
# Most members of an array: a forged shape alone must not make the reader allocate memory.
_MAX_SIZE = 1 << 26
_Encode = Callable[[Any], Any]

MUTABLE: tuple[type, ...] = (list, dict, set, bytearray, deque)
# Mutable types of plain data; both processes see their changes.
SHARED = {list, dict, set, bytearray, deque, Counter, OrderedDict, defaultdict}


def reject(value: Any) -> Any:
    """For `unknown`: accept plain data only."""
    raise TypeError(f"{type(value).__name__} is no plain data")


def encode(
    value: Any,
    unknown: Callable[[Any], Any] = reject,
    held: Callable[[Any, Callable[[], Any]], Any] | None = None,
    shared: Callable[[Any, Callable[[], Any]], Any] | None = None,
) -> Any:
    """Encode a value as JSON types; all but None, bool, int, float, str and list become `{tag: content}`."""
    # By its type and never by isinstance: an object may claim any `__class__`.
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    base = kind if kind in _ENCODERS else plain_base(kind)
    if base is None or kind.__module__ == "numpy":  # a numpy.float64 is a float and holds nothing more
        return _encode_array(value, unknown)

    def content() -> Any:
        return _ENCODERS[base](value, lambda one: encode(one, unknown, held, shared))

    if kind is not base and held is not None:
        return held(value, content)
    return shared(value, content) if shared is not None and base in SHARED else content()


def encode_content(value: Any, inner: _Encode) -> Any:
    """Encode what a container of plain data, or a table, holds; `inner` encodes its members."""
    if is_changeable(value):
        return write(value, inner)
    return _ENCODERS[plain_base(type(value)) or list](value, inner)


def plain_base(kind: type) -> type | None:
    """Return the type of plain data that a class is, or inherits from."""
    return next((base for base in kind.__mro__ if base in _ENCODERS), None)


def _encode_int(value: int, _: _Encode) -> Any:
    value = int.__add__(value, 0)
    return value if -_BIG < value < _BIG else {"int": hex(value)}


def _sequence(tag: str, kind: Any) -> Callable[[Any, _Encode], Any]:
    return lambda value, inner: {tag: [inner(one) for one in kind.__iter__(value)]}


def _encode_deque(value: Any, inner: _Encode) -> Any:
    items = [inner(one) for one in deque.__iter__(value)]
    return {"deque": items} if value.maxlen is None else {"bounded": [value.maxlen, *items]}


def _mapping(tag: str) -> Callable[[Any, _Encode], Any]:
    return lambda value, inner: {tag: [[inner(key), inner(one)] for key, one in pairs_of(value)]}


def pairs_of(value: dict[Any, Any]) -> Any:
    # Bypasses the methods of a subclass. An OrderedDict keeps its order apart from the dict.

    return OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)


_UNCHANGED = {type(None), bool, str, float}
_ENCODERS: dict[type, Callable[[Any, _Encode], Any]] = {
    str: lambda value, _: str.__str__(value),
    int: _encode_int,
    float: lambda value, _: float.__pos__(value),
    list: lambda value, inner: [inner(one) for one in list.__iter__(value)],
    dict: _mapping("dict"),
    Counter: _mapping("counter"),
    OrderedDict: _mapping("ordered"),
    defaultdict: _mapping("default"),
    tuple: _sequence("tuple", tuple),
    set: _sequence("set", set),
    frozenset: _sequence("frozenset", frozenset),
    deque: lambda value, inner: _encode_deque(value, inner),
    type({}.keys()): _sequence("keys", type({}.keys())),
    type({}.values()): _sequence("values", type({}.values())),
    type({}.items()): _sequence("items", type({}.items())),
    bytes: lambda value, _: {"bytes": bytes.hex(value)},
    bytearray: lambda value, _: {"bytearray": bytearray.hex(value)},
    complex: lambda value, _: {"complex": [value.real, value.imag]},
    Decimal: lambda value, _: {"decimal": Decimal.__str__(value)},
    Fraction: lambda value, inner: {"fraction": [inner(value.numerator), inner(value.denominator)]},
    range: lambda value, inner: {"range": [inner(value.start), inner(value.stop), inner(value.step)]},
    slice: lambda value, inner: {"slice": [inner(value.start), inner(value.stop), inner(value.step)]},
    datetime: lambda value, _: {"datetime": datetime.isoformat(value)},
    date: lambda value, _: {"date": date.isoformat(value)},
    time: lambda value, _: {"time": time.isoformat(value)},
    timedelta: lambda value, _: {"timedelta": [value.days, value.seconds, value.microseconds]},
}


def _encode_array(value: Any, unknown: Callable[[Any], Any]) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, list(value.shape), encode(value.ravel().tolist())]}
    if numpy is not None and isinstance(value, numpy.generic) and _DTYPE.fullmatch(value.dtype.str):
        return encode(value.item())
    return unknown(value)


def reject_tag(tag: str, content: Any) -> Any:
    """For `special`: accept no references."""
    raise ValueError(f"unknown tag {tag!r}")


def decode(data: Any, special: Callable[[str, Any], Any] = reject_tag) -> Any:
    """Decode a value; unknown tags are passed to `special`."""
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

    dtype, shape, values = content
    if not _DTYPE.fullmatch(dtype) or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in shape):
        raise ValueError(f"dtype {dtype!r}, shape {shape!r}")
    return numpy.array(decode(values), dtype=dtype).reshape(shape)


_PAIRS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "default": dict,  # its factory stays in its own process
    "counter": Counter,
    "ordered": OrderedDict,
}
_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "bounded": lambda items: deque(items[1:], maxlen=items[0]),
    "slice": lambda items: slice(*items),
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
    "range": lambda content: range(*map(decode, content)),
    "array": _array,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda content: timedelta(*content),
}
_EMPTY: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "set": set,
    "bytearray": bytearray,
    "deque": deque,
    "ordered": OrderedDict,
    "counter": Counter,
}


def empty_container(encoded: Any) -> Any:
    """Return a container, without its content, of the type that is encoded."""
    if isinstance(encoded, list):
        return []
    tag, content = next(iter(encoded.items()))
    if tag == "table":
        return empty_table(content)
    return deque(maxlen=content[0]) if tag == "bounded" else _EMPTY[tag]()


class WatchedContainer:
    """A container that both sides have, and what it held when they last agreed."""

    def __init__(self, container: Any, mine: bool, number: int) -> None:
        self.container, self.mine, self.number = container, mine, number
        self.before = _members(container)

    def changed(self) -> bool:
        # Members are compared by identity, not by value: an `__eq__` of the program could lie.
        try:
            now = _members(self.container)
        except UnsupportedTable:  # after a change that cannot be sent, it is no longer the same table on both sides
            return False
        before: Any = self.before
        same = now == before if isinstance(now, (bytes, Snapshot)) else all(map(operator.is_, now, before))
        if same and len(now) == len(before):
            return False
        self.before = now
        return True


def assign(container: Any, content: Any) -> None:
    """Replace a container's content by that of another of its type."""
    if is_changeable(container):
        return assign_table(container, content)
    kind = next((kind for kind in MUTABLE if isinstance(container, kind)), None)
    if kind is None or not isinstance(content, kind):
        raise TypeError(f"a {type(content).__name__} in place of a {type(container).__name__}")
    if isinstance(container, OrderedDict):  # dict's methods would change its members but not its order
        OrderedDict.clear(container)
        for key, value in pairs_of(content):
            OrderedDict.__setitem__(container, key, value)
        return
    kind.clear(container)
    if kind in (dict, set):
        kind.update(container, content)
    else:
        kind.extend(container, content)


def _members(container: Any) -> list[Any] | bytes | Snapshot:
    if is_changeable(container):
        return Snapshot(container)
    if isinstance(container, dict):
        return [one for pair in pairs_of(container) for one in pair]
    if isinstance(container, bytearray):
        return bytes(container)
    base = plain_base(type(container)) or list
    return list(base.__iter__(container))  # pyright: ignore


LONGEST = 256 * 1024 * 1024
_LENGTH = struct.Struct("!Q")


class Closed(EOFError):
    """The other side has closed the channel."""


def pack(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def send(fd: int, message: Any) -> None:
    """Write a whole message. Raises Closed if the other side no longer reads."""
    data = memoryview(pack(message))
    try:
        while data:
            data = data[os.write(fd, data) :]
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed(str(error)) from None


def receive(fd: int, longest: int = LONGEST, wait: Callable[[], None] = lambda: None) -> Any:
    """Read a whole message. `wait` is called before every read and may raise. An oversized one is a ValueError."""
    size = _LENGTH.unpack(_read_exactly(fd, _LENGTH.size, wait))[0]
    if size > longest:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read_exactly(fd, size, wait))


def _read_exactly(fd: int, count: int, wait: Callable[[], None]) -> bytes:
    chunks = []
    while count:
        wait()
        try:
            chunk = os.read(fd, min(count, 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise Closed("end of messages")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
