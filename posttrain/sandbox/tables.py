"""How tables of pandas, and what they consist of, travel between the processes of a test: as plain data.

This file writes them. `table_reader.py` rebuilds a table from lists, names of types that it checks, and members that
the channel has read. No text of a message is evaluated, and no class is looked up by a name in one. Subclasses, and
types of columns that are not listed here, are not sent. pandas is only imported if a table is sent: most tests and
programs do not use it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from datetime import timezone
from typing import Any

Inner = Callable[[Any], Any]

NUMPY = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16|O|O8|[mM]8\[(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])")
FREQUENCY = re.compile(r"-?\d{0,9}[A-Za-z]{1,8}(-[A-Z0-9]{1,4}){0,3}")
ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")
# Columns of numbers that may be missing: the class of array, and the type of the numbers.
MASKED = {
    **{f"Int{bits}": ("IntegerArray", f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": ("IntegerArray", f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"Float{bits}": ("FloatingArray", f"float{bits}") for bits in (32, 64)},
    "boolean": ("BooleanArray", "bool"),
}  # fmt: skip
_PLAIN = {str, int, float, bool, type(None)}


class UnsupportedTable(TypeError):
    """A table, or a part of one, that cannot be rebuilt exactly from plain data."""


def is_package(value: Any, package: str = "pandas") -> bool:
    """Whether an object is of a class of pandas, or of a class that inherits from one."""
    return any(str(kind.__module__).partition(".")[0] == package for kind in type(value).__mro__)


def is_changeable(value: Any) -> bool:
    """Whether it is a DataFrame or a Series: both processes see changes of these, as of lists."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(value) in _classes(pandas, "DataFrame", "Series")


def can_be_sent(value: Any) -> bool:
    """Whether it is a table, a part of one, or an array that only pandas makes, and can be rebuilt elsewhere."""
    writer = _writer(value)
    if writer is None:
        return False
    try:
        writer(value, lambda _: None)
    except UnsupportedTable:
        return False
    return True


def write(value: Any, inner: Inner) -> dict[str, Any]:
    """Encode a value for which `can_be_sent` is true; `inner` encodes members, names and attributes."""
    writer = _writer(value)
    if writer is None:
        raise UnsupportedTable(f"a {type(value).__name__} is no table")
    return {"table": writer(value, inner)}


def assign_table(table: Any, content: Any) -> None:
    """Replace everything that a table holds by what another one holds."""
    if type(table) is not type(content):
        raise TypeError(f"a {type(content).__name__} in place of a {type(table).__name__}")
    kind: Any = type(table)
    kind.__init__(table, content)
    table.attrs = content.attrs


class Snapshot:
    """What a table held at one moment. Members that can change are compared by identity, as in lists."""

    def __init__(self, table: Any) -> None:
        self._members: list[Any] = []  # kept, so that none of them is replaced by another one with the same id
        self._text = json.dumps(write(table, self._note))
        self._in_frame = type(table).__name__ == "DataFrame"

    def _note(self, member: Any) -> Any:
        if type(member) in _PLAIN:
            return [hex(member)] if type(member) is int else member  # json rejects integers of many digits
        self._members.append(member)
        return [id(member)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self._text == other._text

    def __len__(self) -> int:
        # About the number of members. A Series counts as a long one, which is searched for changes only once after each
        # mention: `apply` of a program hands a function of the tests one Series per row.
        return self._text.count(",") if self._in_frame else 1 << 31


def is_attribute(name: str) -> bool:
    """Whether tables have an attribute of this name, so that its use shows nothing about an object's class."""
    if "pandas" not in sys.modules:
        return False
    if not _attributes:
        pandas = import_pandas()
        for kind in _classes(pandas, "DataFrame", "Series", "Index", "MultiIndex", "DatetimeIndex", "Categorical"):
            _attributes.update(dir(kind))
    return name in _attributes


_attributes: set[str] = set()


def import_pandas() -> Any:
    return importlib.import_module("pandas")


def _classes(pandas: Any, *names: str) -> list[Any]:
    # None for one that does not exist: pandas is being imported, or is another module of this name.
    return [getattr(pandas, name, None) for name in names]


# Writing.


def _writer(value: Any) -> Callable[[Any, Inner], list[Any]] | None:
    # By its type and never by isinstance: a subclass may answer with methods of its own.
    kind, pandas, numpy = type(value), sys.modules.get("pandas"), sys.modules.get("numpy")
    if numpy is not None:
        if kind is numpy.ndarray:
            return _write_numpy if value.dtype.kind in "OmM" else None
        if kind in (numpy.datetime64, numpy.timedelta64):
            return _write_numpy_scalar
        if issubclass(kind, numpy.dtype):
            return lambda dtype, inner: ["dtype", _write_dtype(dtype, inner)]
    if pandas is None:
        return None
    if any(value is one for one in _classes(pandas, "NaT", "NA") if one is not None):
        return lambda one, _: ["NaT" if one is pandas.NaT else "NA"]
    writer = _WRITERS.get(kind.__name__)
    if writer is not None and getattr(pandas, kind.__name__, None) is kind:
        return writer
    if kind.__name__.endswith("Dtype") and is_package(value):
        return lambda dtype, inner: ["dtype", _write_dtype(dtype, inner)]
    extensions = getattr(getattr(pandas, "api", None), "extensions", None)
    if extensions is not None and issubclass(kind, extensions.ExtensionArray):
        return lambda array, inner: ["array", _write_values(array, inner)]
    return None


def _write_frame(frame: Any, inner: Inner) -> list[Any]:
    _reject_flags(frame)
    columns = [_write_values(frame.iloc[:, place], inner) for place in range(frame.shape[1])]
    return ["frame", _part(frame.index, inner), _part(frame.columns, inner), columns, _write_attributes(frame, inner)]


def _write_series(series: Any, inner: Inner) -> list[Any]:
    _reject_flags(series)
    values, attributes = _write_values(series, inner), _write_attributes(series, inner)
    return ["series", _part(series.index, inner), values, inner(series.name), attributes]


def _reject_flags(table: Any) -> None:
    if not table.flags.allows_duplicate_labels:
        raise UnsupportedTable("a table that allows no duplicate labels")


def _write_attributes(table: Any, inner: Inner) -> list[Any]:
    return [[inner(key), inner(value)] for key, value in table.attrs.items()]


def _part(index: Any, inner: Inner) -> list[Any]:
    writer = _writer(index)
    if writer is None or writer not in (_write_index, _write_range, _write_levels):
        raise UnsupportedTable(f"an index of class {type(index).__name__}")
    return writer(index, inner)


def _write_index(index: Any, inner: Inner) -> list[Any]:
    freq = getattr(index, "freq", None) if type(index).__name__ in ("DatetimeIndex", "TimedeltaIndex") else None
    return ["index", _write_values(index, inner), inner(index.name), None if freq is None else _write_frequency(freq)]


def _write_range(index: Any, inner: Inner) -> list[Any]:
    return ["range", index.start, index.stop, index.step, inner(index.name)]


def _write_levels(index: Any, inner: Inner) -> list[Any]:
    levels = [_part(level, inner) for level in index.levels]
    return ["levels", levels, [[int(code) for code in codes] for codes in index.codes], [*map(inner, index.names)]]


def _write_values(values: Any, inner: Inner) -> list[Any]:
    # Of a Series, an Index or an array: its type, and its members in the form that the type defines.
    numpy: Any = sys.modules["numpy"]
    dtype = values.dtype
    if type(dtype).__name__ == "NumpyEADtype" and type(values) is dtype.construct_array_type():
        values = values.to_numpy()  # `series.array` of a column of numpy's
        dtype = values.dtype
    if isinstance(dtype, numpy.dtype):
        values = values if isinstance(values, numpy.ndarray) else values.to_numpy()
        return [_write_dtype(dtype, inner), _members_of(values, inner)]
    array = getattr(values, "array", values)
    described = _write_dtype(dtype, inner)
    if type(array) is not dtype.construct_array_type():
        raise UnsupportedTable(f"an array of class {type(array).__name__}")
    kind = described[0]
    if kind == "masked":
        missing = array.isna()
        numbers = array.to_numpy(dtype=MASKED[described[1]][1], na_value=0)
        return [described, [numbers.tolist(), missing.tolist()]]
    if kind == "string":
        return [described, [None if one else str(text) for text, one in zip(array, array.isna(), strict=True)]]
    if kind == "category":
        return [described, array.codes.tolist()]
    if kind == "interval":
        return [described, [_write_values(array.left, inner), _write_values(array.right, inner)]]
    return [described, array.asi8.tolist()]


def _members_of(array: Any, inner: Inner) -> list[Any]:
    flat = array.ravel()
    if array.dtype.kind in "mM":
        return flat.astype("i8").tolist()
    return flat.tolist() if array.dtype.kind in "biuf" else [inner(one) for one in flat.tolist()]


def _write_numpy(array: Any, inner: Inner) -> list[Any]:
    return ["numpy", list(array.shape), [_write_dtype(array.dtype, inner), _members_of(array, inner)]]


def _write_numpy_scalar(value: Any, inner: Inner) -> list[Any]:
    return ["scalar", [_write_dtype(value.dtype, inner), [int(value.astype("i8"))]]]


def _write_dtype(dtype: Any, inner: Inner) -> list[Any]:
    pandas: Any = sys.modules.get("pandas")
    numpy: Any = sys.modules["numpy"]
    if isinstance(dtype, numpy.dtype):
        if not NUMPY.fullmatch(dtype.str):
            raise UnsupportedTable(f"members of type {dtype}")
        return ["numpy", dtype.str]
    name, kind = type(dtype).__name__, type(dtype)
    if getattr(pandas, name, None) is kind:
        if name.removesuffix("Dtype") in MASKED or name == "BooleanDtype":
            return ["masked", str(dtype.name)]
        if name == "StringDtype":
            return ["string", str(dtype.storage), dtype.na_value is pandas.NA]
        if name == "CategoricalDtype":
            categories = None if dtype.categories is None else _part(dtype.categories, inner)
            return ["category", categories, None if dtype.ordered is None else bool(dtype.ordered)]
        if name == "DatetimeTZDtype":
            return ["zoned", str(dtype.unit), _write_zone(dtype.tz)]
        if name == "PeriodDtype":
            return ["period", _write_frequency(dtype.freq)]
        if name == "IntervalDtype" and dtype.subtype is not None:
            return ["interval", _write_dtype(dtype.subtype, inner), dtype.closed]
    raise UnsupportedTable(f"members of type {name}")


def offset_of(text: str) -> Any:
    return importlib.import_module("pandas.tseries.frequencies").to_offset(text)


def _write_frequency(freq: Any) -> str:
    text = str(freq.freqstr)
    if not FREQUENCY.fullmatch(text) or offset_of(text) != freq:
        raise UnsupportedTable(f"the frequency {text[:100]}")
    return text


def _write_zone(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is timezone:
        return ["offset", zone.utcoffset(None).total_seconds()]
    module, key = type(zone).__module__.partition(".")[0], getattr(zone, "key", getattr(zone, "zone", None))
    if module not in ("zoneinfo", "pytz") or not isinstance(key, str) or not ZONE.fullmatch(key):
        raise UnsupportedTable(f"the time zone {str(zone)[:100]}")
    return [module, key]


def _write_time(time: Any, _: Inner) -> list[Any]:
    kind = "timestamp" if hasattr(time, "tz") else "duration"
    return [kind, str(time.unit), int(time.asm8.astype("i8")), _write_zone(getattr(time, "tz", None))]


def _write_period(period: Any, _: Inner) -> list[Any]:
    return ["period", _write_frequency(period.freq), period.ordinal]


def _write_interval(interval: Any, inner: Inner) -> list[Any]:
    return ["interval", inner(interval.left), inner(interval.right), interval.closed]


_WRITERS: dict[str, Callable[[Any, Inner], list[Any]]] = {
    "DataFrame": _write_frame,
    "Series": _write_series,
    "RangeIndex": _write_range,
    "MultiIndex": _write_levels,
    **{
        name: _write_index
        for name in ("Index", "DatetimeIndex", "TimedeltaIndex", "PeriodIndex", "IntervalIndex", "CategoricalIndex")
    },
    "Timestamp": _write_time,
    "Timedelta": _write_time,
    "Period": _write_period,
    "Interval": _write_interval,
}
