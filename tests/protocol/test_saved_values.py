"""Values of a batch that was saved come back with their types, bit for bit; nothing of a file is run."""

from __future__ import annotations

import json
import struct
import uuid
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from posttrain.batch.saving import TAG, Unsavable, from_json, to_json
from posttrain.protocol import DataProto

BERLIN = ZoneInfo("Europe/Berlin")
TWICE = datetime(2023, 10, 29, 2, 30, tzinfo=BERLIN)
"""A time that the clocks of Berlin showed twice that day."""

VALUES: list[Any] = [
    None,
    True,
    0,
    -0.0,
    5e-324,
    float("nan"),
    float("-inf"),
    0.1,
    2**63,
    -(2**63),
    2**64 - 1,
    -(10**5000),
    "",
    "a\x00b 难 \ud800",
    b"",
    bytes(range(256)),
    bytearray(b"\xff"),
    Decimal("1.10"),
    Decimal("-0E+3"),
    Decimal("NaN"),
    Decimal(10) ** 60,
    complex(-0.0, float("inf")),
    uuid.UUID(int=7),
    datetime(1, 1, 1),
    datetime(9999, 12, 31, 23, 59, 59, 999999),
    datetime(2024, 2, 29, 12, tzinfo=UTC),
    datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(seconds=-1), "odd")),
    TWICE,
    TWICE.replace(fold=1),
    date(2024, 2, 29),
    time(23, 59, 59, 1),
    time(1, tzinfo=UTC),
    timedelta(days=-1, microseconds=1),
    [],
    {},
    (),
    (1, [2, (3,)]),
    {1, "a"},
    frozenset({b"x"}),
    {1: "int", "1": "text", None: 0, (1, 2): "pair", date(2024, 1, 1): "day", 2.5: "float"},
    {TAG: "bytes", "value": "AP8="},
    {TAG: {TAG: 1}},
    {"nested": [{"when": TWICE, "blob": [b"\x00"], "price": Decimal("0.30")}]},
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.float16(0.1),
    np.float32("nan"),
    np.float64(0.1),
    np.bool_(True),
    np.str_("难"),
    np.bytes_(b"ab"),
    np.complex64(1 + 2j),
    np.datetime64("2024-01-01T00:00:00.123456789"),
    np.timedelta64(7, "ns"),
    np.datetime64("NaT"),
    np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
    np.zeros((0, 3)),
    np.array(3.0),
    np.array(["a", "难"]),
    np.array([1, None, {"when": TWICE}, [b"x"]], dtype=object),
]


def identical(a: Any, b: Any) -> bool:
    """The same type, and the same bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        if a.dtype != b.dtype or np.shape(a) != np.shape(b):
            return False
        if a.dtype == object:
            return all(identical(x, y) for x, y in zip(np.ravel(a), np.ravel(b), strict=True))
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, datetime | time):
        same_zone = type(a.tzinfo) is type(b.tzinfo) and str(a.tzinfo) == str(b.tzinfo)
        return same_zone and a.fold == b.fold and a.replace(tzinfo=None) == b.replace(tzinfo=None)
    if isinstance(a, dict):
        return all(identical(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_with_its_type_and_bits(value):
    assert identical(from_json(json.loads(json.dumps(to_json(value)))), value)


def test_a_saved_batch_keeps_the_types_of_rows_and_facts(tmp_path):
    data = DataProto.from_dict({}, {"extra_info": [{"value": value} for value in VALUES]}, {"facts": VALUES})
    data.save_to_disk(tmp_path / "batch")
    back = DataProto.load_from_disk(tmp_path / "batch")
    for row, value in enumerate(VALUES):
        assert identical(back.non_tensor_batch["extra_info"][row], {"value": value}), value
    assert identical(back.meta_info, {"facts": VALUES})


def test_an_array_that_was_read_can_be_written_to():
    array = from_json(to_json(np.zeros(3)))
    array[0] = 1.0
    assert array.tolist() == [1.0, 0.0, 0.0]


def test_subclasses_are_saved_as_what_they_derive_from():
    class Level(IntEnum):
        HIGH = 3

    assert identical(from_json(to_json([Level.HIGH, OrderedDict(a=1)])), [3, {"a": 1}])


@pytest.mark.parametrize(
    "value, inside, what",
    [
        ({"a": [1, object()]}, "['a'][1]", "a object"),
        ([{3: {"x": lambda: 0}}], "[0][3]['x']", "a function"),
        ({"z": np.zeros(2, dtype=[("a", "i4")])}, "['z']", "a numpy value of type [('a', '<i4')]"),
        ((1, {"t": object()}), "[1]['t']", "a object"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_says_where_it_is(value, inside, what):
    with pytest.raises(Unsavable) as caught:
        to_json(value)
    assert (caught.value.inside, caught.value.what) == (inside, what)


def test_batches_of_earlier_versions_are_read_as_they_stand(tmp_path):
    DataProto.from_dict({}, {"info": [1, 2]}).save_to_disk(tmp_path)
    earlier = {"rows": 2, "non_tensor_batch": {"info": [{TAG: "mine"}, [1]]}, "meta_info": {"m": {"a": 1}}}
    (tmp_path / "fields.json").write_text(json.dumps(earlier))
    back = DataProto.load_from_disk(tmp_path)
    assert back.non_tensor_batch["info"].tolist() == [{TAG: "mine"}, [1]] and back.meta_info == {"m": {"a": 1}}
