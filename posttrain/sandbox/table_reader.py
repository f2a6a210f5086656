"""Tables of pandas from messages, as `tables.py` wrote them.

The sender may be a program's process that was patched: every text is checked, and lengths must agree. Nothing of a
message is evaluated.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from datetime import UTC, timedelta, timezone
from typing import Any

from posttrain.sandbox.tables import FREQUENCY, MASKED, NUMPY, ZONE, Inner, import_pandas, offset_of

UNITS = ("s", "ms", "us", "ns")
SHARED = {"frame": "DataFrame", "series": "Series"}
CLOSED = ("left", "right", "both", "neither")


def read(content: Any, inner: Inner) -> Any:
    """Rebuild what `write` has encoded. Anything else raises an exception, and runs nothing."""
    if not isinstance(content, list) or not content or content[0] not in _READERS:
        raise ValueError("no table")
    kind, *parts = content
    return _READERS[kind](inner, *parts)


def empty_table(content: Any) -> Any:
    """Return an empty table of the class that is encoded."""
    if not isinstance(content, list) or not content or content[0] not in SHARED:
        raise ValueError("no table that can change")
    return getattr(import_pandas(), SHARED[content[0]])(dtype=object)


def _read_frame(inner: Inner, index: Any, columns: Any, values: Any, attributes: Any) -> Any:
    pandas = import_pandas()
    index, columns = _read_part(inner, index), _read_part(inner, columns)
    arrays = [_read_values(inner, one) for one in values]
    _require(len(arrays) == len(columns) and all(len(one) == len(index) for one in arrays), "lengths")
    # By number: names may occur twice. All have the same index, so that nothing is aligned.
    frame = pandas.DataFrame({place: _as_series(one) for place, one in enumerate(arrays)}, index=range(len(index)))
    frame.index, frame.columns = index, columns
    return _with_attributes(frame, inner, attributes)


def _read_series(inner: Inner, index: Any, values: Any, name: Any, attributes: Any) -> Any:
    index, series = _read_part(inner, index), _as_series(_read_values(inner, values))
    _require(len(series) == len(index), "lengths")
    series.index, series.name = index, inner(name)
    return _with_attributes(series, inner, attributes)


def _as_series(values: Any) -> Any:
    return import_pandas().Series(values, dtype=values.dtype)  # with the type, so that none is inferred


def _with_attributes(table: Any, inner: Inner, attributes: Any) -> Any:
    table.attrs.update({inner(key): inner(value) for key, value in attributes})
    return table


def _read_part(inner: Inner, content: Any) -> Any:
    _require(isinstance(content, list) and bool(content) and content[0] in ("index", "range", "levels"), "index")
    return read(content, inner)


def _read_index(inner: Inner, values: Any, name: Any, freq: Any) -> Any:
    values = _read_values(inner, values)
    index = import_pandas().Index(values, dtype=values.dtype, name=inner(name), tupleize_cols=False)
    if freq is not None:
        _require(type(index).__name__ in ("DatetimeIndex", "TimedeltaIndex"), "index")
        index.freq = _read_frequency(freq)
    return index


def _read_range(inner: Inner, start: Any, stop: Any, step: Any, name: Any) -> Any:
    _require(all(type(one) is int and abs(one) < 1 << 62 for one in (start, stop, step)), "range")
    return import_pandas().RangeIndex(start, stop, step, name=inner(name))


def _read_levels(inner: Inner, levels: Any, codes: Any, names: Any) -> Any:
    _require(all(isinstance(one, list) and one and one[0] in ("index", "range") for one in levels), "levels")
    _require(len(levels) == len(codes) == len(names), "lengths")
    codes, levels = [_numbers(one, "i8") for one in codes], [_read_part(inner, one) for one in levels]
    return import_pandas().MultiIndex(levels=levels, codes=codes, names=[*map(inner, names)], verify_integrity=True)


def _read_values(inner: Inner, content: Any) -> Any:
    described, members = content
    pandas, dtype = import_pandas() if described[0] != "numpy" else None, _read_dtype(inner, described)
    kind = described[0]
    if pandas is None:
        return _read_numpy_values(inner, dtype, members)
    if kind == "masked":
        array, numbers = MASKED[described[1]]
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


def _read_numpy_values(inner: Inner, dtype: Any, members: Any) -> Any:
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


def _read_dtype(inner: Inner, content: Any) -> Any:
    kind, *parts = content
    if kind == "numpy":
        import numpy

        return numpy.dtype(_match(NUMPY, parts[0]))
    pandas = import_pandas()
    if kind == "masked":
        _require(parts[0] in MASKED, "type")
        return pandas.api.types.pandas_dtype(parts[0])
    if kind == "string":
        _require(parts[0] in ("python", "pyarrow", "pyarrow_numpy"), "storage")
        # pandas 2.2 has no `na_value`.
        return pandas.StringDtype(parts[0]) if parts[1] is True else pandas.StringDtype(parts[0], na_value=float("nan"))
    if kind == "category":
        _require(parts[1] in (True, False, None), "order")
        return pandas.CategoricalDtype(None if parts[0] is None else _read_part(inner, parts[0]), parts[1])
    if kind == "zoned":
        _require(parts[0] in UNITS, "unit")
        return pandas.DatetimeTZDtype(parts[0], _read_zone(parts[1]))
    if kind == "period":
        return pandas.PeriodDtype(_read_frequency(parts[0]))
    _require(kind == "interval" and parts[1] in CLOSED, "type")
    return pandas.IntervalDtype(_read_dtype(inner, parts[0]), parts[1])


def _read_numpy(inner: Inner, shape: Any, values: Any) -> Any:
    _require(all(type(size) is int and size >= 0 for size in shape) and values[0][0] == "numpy", "array")
    return _read_values(inner, values).reshape(shape)


def _read_scalar(inner: Inner, values: Any) -> Any:
    array = _read_numpy(inner, [1], values)
    _require(array.dtype.kind in "mM", "scalar")
    return array[0]


def _read_frequency(text: Any) -> Any:
    return offset_of(_match(FREQUENCY, text))


def _read_zone(content: Any) -> Any:
    if content is None:
        return None
    module, key = content
    if module == "offset":
        return UTC if key == 0 else timezone(timedelta(seconds=key))
    _require(module in ("zoneinfo", "pytz"), "time zone")
    library = importlib.import_module(module)
    return (library.ZoneInfo if module == "zoneinfo" else library.timezone)(_match(ZONE, key))


def _read_timestamp(_: Inner, unit: Any, number: Any, zone: Any) -> Any:
    import numpy

    _require(unit in UNITS and type(number) is int, "time")
    time = import_pandas().Timestamp(numpy.datetime64(number, unit))
    return time if zone is None else time.tz_localize("UTC").tz_convert(_read_zone(zone))


def _read_duration(_: Inner, unit: Any, number: Any, _zone: Any) -> Any:
    import numpy

    _require(unit in UNITS and type(number) is int, "time")
    return import_pandas().Timedelta(numpy.timedelta64(number, unit))


def _read_period(_: Inner, freq: Any, ordinal: Any) -> Any:
    _require(type(ordinal) is int, "period")
    return import_pandas().Period(ordinal=ordinal, freq=_read_frequency(freq))


def _read_interval(inner: Inner, left: Any, right: Any, closed: Any) -> Any:
    _require(closed in CLOSED, "interval")
    return import_pandas().Interval(inner(left), inner(right), closed)


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
    "NaT": lambda _: import_pandas().NaT,
    "NA": lambda _: import_pandas().NA,
}
