"""How tables of pandas, and what they consist of, travel between the processes of a test: as plain data.

Each process rebuilds a table from lists, names of types that are checked here, and members that the channel has read.
No text of a message is evaluated, and no class is looked up by a name in one. Subclasses, and types of columns that are
not listed here, are not sent. pandas is only imported if a table is sent: most tests and programs do not use it.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, timedelta, timezone
from typing import Any

_Inner = Callable[[Any], Any]

_NUMPY = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248]|c8|c16|O|O8|[mM]8\[(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])")
_UNITS = ("s", "ms", "us", "ns")
_CLOSED = ("left", "right", "both", "neither")
_FREQUENCY = re.compile(r"-?\d{0,9}[A-Za-z]{1,8}(-[A-Z0-9]{1,4}){0,3}")
_ZONE = re.compile(r"[A-Za-z0-9_+-]{1,40}(/[A-Za-z0-9_+-]{1,40}){0,2}")
# Columns of numbers that may be missing: the class of array, and the type of the numbers.
_MASKED = {
    **{f"Int{bits}": ("IntegerArray", f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"UInt{bits}": ("IntegerArray", f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"Float{bits}": ("FloatingArray", f"float{bits}") for bits in (32, 64)},
    "boolean": ("BooleanArray", "bool"),
}  # fmt: skip
_SHARED = {"frame": "DataFrame", "series": "Series"}
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


def write(value: Any, inner: _Inner) -> dict[str, Any]:
    """Encode a value for which `can_be_sent` is true; `inner` encodes members, names and attributes."""
    writer = _writer(value)
    if writer is None:
        raise UnsupportedTable(f"a {type(value).__name__} is no table")
    return {"table": writer(value, inner)}


def read(content: Any, inner: _Inner) -> Any:
    """Rebuild what `write` has encoded. Anything else raises an exception, and runs nothing."""
    if not isinstance(content, list) or not content or content[0] not in _READERS:
        raise ValueError("no table")
    kind, *parts = content
    return _READERS[kind](inner, *parts)


def empty_table(content: Any) -> Any:
    """Return an empty table of the class that is encoded."""
    if not isinstance(content, list) or not content or content[0] not in _SHARED:
        raise ValueError("no table that can change")
    return getattr(_import_pandas(), _SHARED[content[0]])(dtype=object)


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
        pandas = _import_pandas()
        for kind in _classes(pandas, "DataFrame", "Series", "Index", "MultiIndex", "DatetimeIndex", "Categorical"):
            _attributes.update(dir(kind))
    return name in _attributes


_attributes: set[str] = set()


def _import_pandas() -> Any:
    return importlib.import_module("pandas")


def _classes(pandas: Any, *names: str) -> list[Any]:
    # None for one that does not exist: pandas is being imported, or is another module of this name.
    return [getattr(pandas, name, None) for name in names]


# Writing.


def _writer(value: Any) -> Callable[[Any, _Inner], list[Any]] | None:
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


def _write_frame(frame: Any, inner: _Inner) -> list[Any]:
    _reject_flags(frame)
    columns = [_write_values(frame.iloc[:, place], inner) for place in range(frame.shape[1])]
    return ["frame", _part(frame.index, inner), _part(frame.columns, inner), columns, _write_attributes(frame, inner)]


def _write_series(series: Any, inner: _Inner) -> list[Any]:
    _reject_flags(series)
    values, attributes = _write_values(series, inner), _write_attributes(series, inner)
    return ["series", _part(series.index, inner), values, inner(series.name), attributes]


def _reject_flags(table: Any) -> None:
    if not table.flags.allows_duplicate_labels:
        raise UnsupportedTable("a table that allows no duplicate labels")


def _write_attributes(table: Any, inner: _Inner) -> list[Any]:
    return [[inner(key), inner(value)] for key, value in table.attrs.items()]


def _part(index: Any, inner: _Inner) -> list[Any]:
    writer = _writer(index)
    if writer is None or writer not in (_write_index, _write_range, _write_levels):
        raise UnsupportedTable(f"an index of class {type(index).__name__}")
    return writer(index, inner)


def _write_index(index: Any, inner: _Inner) -> list[Any]:
    freq = getattr(index, "freq", None) if type(index).__name__ in ("DatetimeIndex", "TimedeltaIndex") else None
    return ["index", _write_values(index, inner), inner(index.name), None if freq is None else _write_frequency(freq)]


def _write_range(index: Any, inner: _Inner) -> list[Any]:
    return ["range", index.start, index.stop, index.step, inner(index.name)]


def _write_levels(index: Any, inner: _Inner) -> list[Any]:
    levels = [_part(level, inner) for level in index.levels]
    return ["levels", levels, [[int(code) for code in codes] for codes in index.codes], [*map(inner, index.names)]]


def _write_values(values: Any, inner: _Inner) -> list[Any]:
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
        numbers = array.to_numpy(dtype=_MASKED[described[1]][1], na_value=0)
        return [described, [numbers.tolist(), missing.tolist()]]
    if kind == "string":
        return [described, [None if one else str(text) for text, one in zip(array, array.isna(), strict=True)]]
    if kind == "category":
        return [described, array.codes.tolist()]
    if kind == "interval":
        return [described, [_write_values(array.left, inner), _write_values(array.right, inner)]]
    return [described, array.asi8.tolist()]


def _members_of(array: Any, inner: _Inner) -> list[Any]:
    flat = array.ravel()
    if array.dtype.kind in "mM":
        return flat.astype("i8").tolist()
    return flat.tolist() if array.dtype.kind in "biuf" else [inner(one) for one in flat.tolist()]


def _write_numpy(array: Any, inner: _Inner) -> list[Any]:
    return ["numpy", list(array.shape), [_write_dtype(array.dtype, inner), _members_of(array, inner)]]


def _write_numpy_scalar(value: Any, inner: _Inner) -> list[Any]:
    return ["scalar", [_write_dtype(value.dtype, inner), [int(value.astype("i8"))]]]


def _write_dtype(dtype: Any, inner: _Inner) -> list[Any]:
    pandas: Any = sys.modules.get("pandas")
    numpy: Any = sys.modules["numpy"]
    if isinstance(dtype, numpy.dtype):
        if not _NUMPY.fullmatch(dtype.str):
            raise UnsupportedTable(f"members of type {dtype}")
        return ["numpy", dtype.str]
    name, kind = type(dtype).__name__, type(dtype)
    if getattr(pandas, name, None) is kind:
        if name.removesuffix("Dtype") in _MASKED or name == "BooleanDtype":
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


def _write_frequency(freq: Any) -> str:
    text = str(freq.freqstr)
    if not _FREQUENCY.fullmatch(text) or _offset(text) != freq:
        raise UnsupportedTable(f"the frequency {text[:100]}")
    return text


def _write_zone(zone: Any) -> Any:
    if zone is None:
        return None
    if type(zone) is timezone:
        return ["offset", zone.utcoffset(None).total_seconds()]
    module, key = type(zone).__module__.partition(".")[0], getattr(zone, "key", getattr(zone, "zone", None))
    if module not in ("zoneinfo", "pytz") or not isinstance(key, str) or not _ZONE.fullmatch(key):
        raise UnsupportedTable(f"the time zone {str(zone)[:100]}")
    return [module, key]


def _write_time(time: Any, _: _Inner) -> list[Any]:
    kind = "timestamp" if hasattr(time, "tz") else "duration"
    return [kind, str(time.unit), int(time.asm8.astype("i8")), _write_zone(getattr(time, "tz", None))]


def _write_period(period: Any, _: _Inner) -> list[Any]:
    return ["period", _write_frequency(period.freq), period.ordinal]


def _write_interval(interval: Any, inner: _Inner) -> list[Any]:
    return ["interval", inner(interval.left), inner(interval.right), interval.closed]


_WRITERS: dict[str, Callable[[Any, _Inner], list[Any]]] = {
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


# Reading. The sender may be a program's process that was patched: every text is checked, and lengths must agree.


def _read_frame(inner: _Inner, index: Any, columns: Any, values: Any, attributes: Any) -> Any:
    pandas = _import_pandas()
    index, columns = _read_part(inner, index), _read_part(inner, columns)
    arrays = [_read_values(inner, one) for one in values]
    _require(len(arrays) == len(columns) and all(len(one) == len(index) for one in arrays), "lengths")
    # By number: names may occur twice. All have the same index, so that nothing is aligned.
    frame = pandas.DataFrame({place: _as_series(one) for place, one in enumerate(arrays)}, index=range(len(index)))
    frame.index, frame.columns = index, columns
    return _with_attributes(frame, inner, attributes)


def _read_series(inner: _Inner, index: Any, values: Any, name: Any, attributes: Any) -> Any:
    index, series = _read_part(inner, index), _as_series(_read_values(inner, values))
    _require(len(series) == len(index), "lengths")
    series.index, series.name = index, inner(name)
    return _with_attributes(series, inner, attributes)


def _as_series(values: Any) -> Any:
    return _import_pandas().Series(values, dtype=values.dtype)  # with the type, so that none is inferred


def _with_attributes(table: Any, inner: _Inner, attributes: Any) -> Any:
    table.attrs.update({inner(key): inner(value) for key, value in attributes})
    return table


def _read_part(inner: _Inner, content: Any) -> Any:
    _require(isinstance(content, list) and bool(content) and content[0] in ("index", "range", "levels"), "index")
    return read(content, inner)


def _read_index(inner: _Inner, values: Any, name: Any, freq: Any) -> Any:
    values = _read_values(inner, values)
    index = _import_pandas().Index(values, dtype=values.dtype, name=inner(name), tupleize_cols=False)
    if freq is not None:
        _require(type(index).__name__ in ("DatetimeIndex", "TimedeltaIndex"), "index")
        index.freq = _read_frequency(freq)
    return index


def _read_range(inner: _Inner, start: Any, stop: Any, step: Any, name: Any) -> Any:
    _require(all(type(one) is int and abs(one) < 1 << 62 for one in (start, stop, step)), "range")
    return _import_pandas().RangeIndex(start, stop, step, name=inner(name))


def _read_levels(inner: _Inner, levels: Any, codes: Any, names: Any) -> Any:
    _require(all(isinstance(one, list) and one and one[0] in ("index", "range") for one in levels), "levels")
    _require(len(levels) == len(codes) == len(names), "lengths")
    codes, levels = [_numbers(one, "i8") for one in codes], [_read_part(inner, one) for one in levels]
    return _import_pandas().MultiIndex(levels=levels, codes=codes, names=[*map(inner, names)], verify_integrity=True)


def _read_values(inner: _Inner, content: Any) -> Any:
    described, members = content
    pandas, dtype = _import_pandas() if described[0] != "numpy" else None, _read_dtype(inner, described)
    kind = described[0]
    if pandas is None:
        return _read_numpy_values(inner, dtype, members)
    if kind == "masked":
        array, numbers = _MASKED[described[1]]
        return getattr(pandas.arrays, array)(_numbers(members[0], numbers), _numbers(members[1], "bool"))
    if kind == "string":
        _require(all(one is None or type(one) is str for one in members), "texts")
        return pandas.array(members, dtype=dtype)
    if kind == "category":
        _require(dtype.categories is not None, "categories")
        return pandas.Categorical.from_codes(_numbers(members, "i8"), dtype=dtype)
    if kind == "interval":
        left, right = (_read_values(inner, one) for one in members)
        return pandas.arrays.IntervalArray.from_arrays(left, right, closed=dtype.closed, dtype=dtype)
    numbers = _numbers(members, "i8")
    if kind == "period":
        return pandas.arrays.PeriodArray(numbers, dtype=dtype)
    times = pandas.DatetimeIndex(numbers.view(f"M8[{dtype.unit}]"))
    return times.tz_localize("UTC").tz_convert(dtype.tz).array


def _read_numpy_values(inner: _Inner, dtype: Any, members: Any) -> Any:
    import numpy

    _require(isinstance(members, list), "members")
    if dtype.kind == "O":
        array = numpy.empty(len(members), dtype=object)
        for place, one in enumerate(members):  # one by one: numpy would look into members that are lists
            array[place] = inner(one)
        return array
    if dtype.kind in "mM":
        return _numbers(members, "i8").astype(dtype)
    return _numbers([inner(one) for one in members] if dtype.kind == "c" else members, dtype)


def _numbers(members: Any, dtype: Any) -> Any:
    import numpy

    _require(isinstance(members, list) and all(type(one) in (int, float, bool, complex) for one in members), "numbers")
    return numpy.array(members, dtype=dtype)


def _read_dtype(inner: _Inner, content: Any) -> Any:
    kind, *parts = content
    if kind == "numpy":
        import numpy

        return numpy.dtype(_match(_NUMPY, parts[0]))
    pandas = _import_pandas()
    if kind == "masked":
        _require(parts[0] in _MASKED, "type")
        return pandas.api.types.pandas_dtype(parts[0])
    if kind == "string":
        _require(parts[0] in ("python", "pyarrow", "pyarrow_numpy"), "storage")
        # pandas 2.2 has no `na_value`.
        return pandas.StringDtype(parts[0]) if parts[1] is True else pandas.StringDtype(parts[0], na_value=float("nan"))
    if kind == "category":
        _require(parts[1] in (True, False, None), "order")
        return pandas.CategoricalDtype(None if parts[0] is None else _read_part(inner, parts[0]), parts[1])
    if kind == "zoned":
        _require(parts[0] in _UNITS, "unit")
        return pandas.DatetimeTZDtype(parts[0], _read_zone(parts[1]))
    if kind == "period":
        return pandas.PeriodDtype(_read_frequency(parts[0]))
    _require(kind == "interval" and parts[1] in _CLOSED, "type")
    return pandas.IntervalDtype(_read_dtype(inner, parts[0]), parts[1])


def _read_numpy(inner: _Inner, shape: Any, values: Any) -> Any:
    _require(all(type(size) is int and size >= 0 for size in shape) and values[0][0] == "numpy", "array")
    return _read_values(inner, values).reshape(shape)


def _read_scalar(inner: _Inner, values: Any) -> Any:
    array = _read_numpy(inner, [1], values)
    _require(array.dtype.kind in "mM", "scalar")
    return array[0]


def _read_frequency(text: Any) -> Any:
    return _offset(_match(_FREQUENCY, text))


def _offset(text: str) -> Any:
    return importlib.import_module("pandas.tseries.frequencies").to_offset(text)


def _read_zone(content: Any) -> Any:
    if content is None:
        return None
    module, key = content
    if module == "offset":
        return UTC if key == 0 else timezone(timedelta(seconds=key))
    _require(module in ("zoneinfo", "pytz"), "time zone")
    library = importlib.import_module(module)
    return (library.ZoneInfo if module == "zoneinfo" else library.timezone)(_match(_ZONE, key))


def _read_timestamp(_: _Inner, unit: Any, number: Any, zone: Any) -> Any:
    import numpy

    _require(unit in _UNITS and type(number) is int, "time")
    time = _import_pandas().Timestamp(numpy.datetime64(number, unit))
    return time if zone is None else time.tz_localize("UTC").tz_convert(_read_zone(zone))


def _read_duration(_: _Inner, unit: Any, number: Any, _zone: Any) -> Any:
    import numpy

    _require(unit in _UNITS and type(number) is int, "time")
    return _import_pandas().Timedelta(numpy.timedelta64(number, unit))


def _read_period(_: _Inner, freq: Any, ordinal: Any) -> Any:
    _require(type(ordinal) is int, "period")
    return _import_pandas().Period(ordinal=ordinal, freq=_read_frequency(freq))


def _read_interval(inner: _Inner, left: Any, right: Any, closed: Any) -> Any:
    _require(closed in _CLOSED, "interval")
    return _import_pandas().Interval(inner(left), inner(right), closed)


def _match(pattern: re.Pattern[str], text: Any) -> str:
    _require(isinstance(text, str) and pattern.fullmatch(text) is not None, "name")
    return text


def _require(true: bool, what: str) -> None:
    if not true:
        raise ValueError(f"a table with wrong parts: {what}")


_READERS: dict[str, Callable[..., Any]] = {
    "frame": _read_frame,
    "series": _read_series,
    "index": _read_index,
    "range": _read_range,
    "levels": _read_levels,
    "array": lambda inner, content: _as_series(_read_values(inner, content)).array,
    "numpy": _read_numpy,
    "scalar": _read_scalar,
    "dtype": _read_dtype,
    "timestamp": _read_timestamp,
    "duration": _read_duration,
    "period": _read_period,
    "interval": _read_interval,
    "NaT": lambda _: _import_pandas().NaT,
    "NA": lambda _: _import_pandas().NA,
}
