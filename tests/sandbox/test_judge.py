"""Tests run against a program in another process: what they may do, and what the program cannot do to them."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

from posttrain.sandbox.judge import entries
from posttrain.sandbox.values import decode, encode


def verdicts(box, program, *codes, entry=None):
    report = box.test(program, [{"code": code, "entry": entry} for code in codes])
    return [outcome["passed"] for outcome in report.outcomes]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -5, 10**3000, 1.5, -0.0, math.inf, "", "ü\ud800", [1, [2]], (1, (2, "a")), {1, 2},
        frozenset("ab"), {"a": 1, 2: (3,)}, b"\x00\xff", bytearray(b"a"), 1 + 2j, Decimal("1.10"), Fraction(1, 3),
        range(1, 9, 2), {"dict": [1]}, [{"tuple": 1}],
    ],
)  # fmt: skip
def test_values_travel_as_they_are(value):
    back = decode(encode(value))
    assert back == value and type(back) is type(value)


def test_arrays_travel_and_subclasses_lose_what_they_add():
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    back = decode(encode(array))
    assert (back == array).all() and back.dtype == array.dtype and back.shape == array.shape
    assert encode(numpy.int64(3)) == 3 and encode(numpy.bool_(True)) is True

    class Yes(list):
        def __eq__(self, other):
            return True

    class One(int):
        def __eq__(self, other):
            return True

    assert type(decode(encode(Yes([1])))) is list and type(decode(encode(One(1)))) is int
    with pytest.raises(TypeError, match="object is no plain data"):
        encode(object())


@pytest.mark.parametrize("data", [{"a": 1, "b": 2}, {"unknown": 1}, {"array": ["O", []]}, {"set": [[1]]}, {"bytes": 5}])
def test_what_is_no_encoded_value_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        decode(data)


def test_asserts_see_values_exceptions_and_changed_arguments(box):
    program = """
import math
def double(x): return x * 2
def pair(x): return (x, [x])
def sort(items): items.sort()
def fail(x): raise KeyError(x)
class Odd(Exception): pass
def odd(): raise Odd("hm")
def squares():
    for i in range(3): yield i * i
def apply(f, x): return f(x) + 1
LIMIT = 7
"""
    good = [
        "assert double(4) == 8",
        "assert pair(1) == (1, [1]) and pair(1) != [1, [1]]",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "try:\n    fail('a')\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "try:\n    odd()\nexcept Exception as e:\n    assert 'hm' in str(e)",
        "assert list(squares()) == [0, 1, 4] and sum(squares()) == 5",
        "assert apply(lambda x: x * 10, 4) == 41",
        "assert LIMIT == 7",
        "assert math.isclose(double(0.1), 0.2)",
        "from solution import double as d\nassert d(1) == 2",
        "import solution\nassert solution.double(x=1) == 2",
        "def test_one():\n    assert double(1) == 2",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(1), 2)",
        "import numpy as np\nassert (double(np.array([1, 2])) == np.array([2, 4])).all()",
    ]
    assert verdicts(box, program, *good) == [True] * len(good)
    bad = [
        "assert double(4) == 9",
        "assert pair(1) == [1, [1]]",
        "double()",
        "nothing(1)",
        "def test_one():\n    assert double(1) == 3",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(1), 3)",
        "import sys\nsys.exit(1)",
        "assert (",
    ]
    assert verdicts(box, program, *bad) == [False] * len(bad)


def test_objects_of_the_program_can_be_used_but_never_compared(box):
    program = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return True
    def __getitem__(self, i): return self.items[i]
    def __contains__(self, x): return x in self.items
"""
    good = (
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s[0] == 1 and 2 in s\nassert s.pop() == 2\n"
        "s.items = [9]\nassert s.items == [9]\nassert s == s"
    )
    assert verdicts(box, program, good, "assert Stack() == 5", "assert Stack() == Stack()") == [True, False, False]


def test_calls_give_back_values(box):
    calls = [{"call": "add", "args": [1, encode((2,))]}, {"call": "gen", "args": []}, {"call": "gone", "args": []}]
    program = "class Solution:\n    def add(self, a, b): return {a: b}\n    def gen(self): yield from 'ab'"
    report = box.test(program, calls)
    assert report.outcomes[0] == {"test": 0, "value": {"dict": [[1, {"tuple": [2]}]]}}
    assert report.outcomes[1]["value"] == ["a", "b"]
    assert "defines no gone" in report.outcomes[2]["error"]


def test_only_a_name_that_every_test_calls_may_replace_a_builtin():
    assert entries(["assert sum(10, 15) == 6", "assert sum(1, 2) == 3"]) == {"sum"}
    assert entries(["assert abs(f(1) - 2) < 1", "assert abs(f(2) - 2) < 1"]) == set()
    assert entries(["assert sum(f(1)) == 6", "assert f(2) == 3"]) == set()


def test_a_program_that_does_not_load_says_why(box):
    report = box.test("x = 1\nimport nothing_there", [{"code": "assert True"}])
    assert not report.loaded and report.outcomes == []
    assert report.load_error == {"name": "ModuleNotFoundError", "text": "No module named 'nothing_there'", "line": 2}
    assert box.test("def f(:", [{"code": "assert True"}]).load_error["line"] == 1
    assert box.test("raise SystemExit(0)", [{"code": "assert True"}]).load_error["name"] == "SystemExit"


def test_what_a_tested_program_prints_is_kept_apart(box):
    report = box.test("print('loading')\ndef f():\n    print('called')\n    return 1", [{"code": "assert f() == 1"}])
    assert report.stdout == "loading\ncalled\n" and report.outcomes == [{"test": 0, "passed": True}]
