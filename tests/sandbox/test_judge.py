"""Tests run against a program in another process: what they may do, and what the program cannot do to them."""

from __future__ import annotations

import ast
import math
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest

from posttrain.sandbox.names import builtins_under_test
from posttrain.sandbox.wire import decode, encode


def verdicts(box, program, *codes, entry=None):
    report = box.test(program, [{"code": code, "entry": entry} for code in codes])
    return [outcome["passed"] for outcome in report.outcomes]


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -5, 10**3000, 1.5, -0.0, math.inf, "", "ü\ud800", [1, [2]], (1, (2, "a")), {1, 2},
        frozenset("ab"), {"a": 1, 2: (3,)}, b"\x00\xff", bytearray(b"a"), 1 + 2j, Decimal("1.10"), Fraction(1, 3),
        range(1, 9, 2), {"dict": [1]}, [{"tuple": 1}],
        deque([1, (2,)]), Counter("aab"), OrderedDict([("b", 1), ("a", 2)]), {1: 2}.keys(), {1: 2}.items(),
        datetime(2024, 2, 29, 12, 30, 1, 5), datetime(2024, 1, 1, tzinfo=UTC), date(2024, 2, 29), time(1, 2),
        timedelta(-1, 5, 7),
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
def grow(counts, queue): counts['b'] += 2; queue.append(2)
def fail(x): raise KeyError(x)
class Odd(Exception): pass
def odd(): raise Odd("hm")
def squares():
    for i in range(3): yield i * i
def apply(f, x): return f(x) + 1
def shout(f, x): return f(x)
def kind(types, x): return isinstance(x, types)
def catches(error):
    try: raise ValueError
    except error: return True
LIMIT = 7
"""
    good = [
        "assert double(4) == 8",
        "assert pair(1) == (1, [1]) and pair(1) != [1, [1]]",
        "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
        "from collections import Counter, deque\nc, q = Counter('ab'), deque([1])\ngrow(c, q)\n"
        "assert c == {'a': 1, 'b': 3} and c.most_common(1) == [('b', 3)] and q == deque([1, 2])",
        "try:\n    fail('a')\nexcept KeyError:\n    pass\nelse:\n    assert False",
        "try:\n    odd()\nexcept Exception as e:\n    assert 'hm' in str(e)",
        "assert list(squares()) == [0, 1, 4] and sum(squares()) == 5",
        "assert apply(lambda x: x * 10, 4) == 41",
        "import math\nassert apply(len, 'abc') == 4 and apply(math.sqrt, 4) == 3 and shout(str.upper, 'a') == 'A'",
        "assert kind(int, 5) and not kind(str, 5) and kind((int, str), 'a') and catches(ValueError)",
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


STACK = """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return True
    def __getitem__(self, i): return self.items[i]
    def __contains__(self, x): return x in self.items
def make(): return Stack()
"""
USED = (
    "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s[0] == 1 and 2 in s\nassert s.pop() == 2\n"
    "s.items = [9]\nassert s.items == [9]\nassert s == s"
)


def test_objects_of_the_program_can_be_used_but_never_compared(box):
    """Not with plain data, as long as the tests do not show that they mean an object."""
    assert verdicts(box, STACK, "assert make() == 5", "assert make() == [1, 2]") == [False, False]
    assert verdicts(box, STACK, USED.replace("Stack()", "make()")) == [True]


def test_objects_whose_class_the_tests_name_answer_for_themselves(box):
    # As in plain Python: the class is what is tested, and its `==` with it.
    assert verdicts(box, STACK, USED, "assert Stack() == Stack()", "assert Stack() == 5") == [True, True, True]
    wrong = STACK.replace("return True", "return False")
    assert verdicts(box, wrong, "assert Stack() == Stack()", "assert Stack() == 5") == [False, False]


def test_annotations_may_name_a_class_that_only_the_tests_define(box):
    program = "class Solution:\n    def last(self, head: Optional[ListNode]) -> ListNode:\n        return head.next"
    test = (
        "from typing import Optional\nclass ListNode:\n    def __init__(self, val, next=None): "
        "self.val, self.next = val, next\nassert Solution().last(ListNode(1, ListNode(2))).val == 2"
    )
    assert verdicts(box, program, test, test.replace("== 2", "== 1")) == [True, False]
    assert box.test("x = not_defined", [{"code": "pass"}]).load_error["name"] == "NameError"


OBJECTS = """
import collections, contextlib, dataclasses, datetime
class Trie:
    def __init__(self): self.words = []
    def insert(self, word): self.words.append(word)
    def startswith(self, text): return any(word.startswith(text) for word in self.words)
    def __contains__(self, word): return word in self.words
class Builder:
    def __init__(self): self.parts = []
    def append(self, part): self.parts.append(part); return self
    def build(self): return ''.join(self.parts)
    def copy(self): new = Builder(); new.parts = self.parts[:]; return new
    def __iter__(self): return iter(self.parts)
    def __len__(self): return len(self.parts)
    def __getitem__(self, key): return self.parts[key]
class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next
class Tools:
    @staticmethod
    def count(text): return len(text)
@dataclasses.dataclass
class Book:
    title: str
    index: int
def chain(values):
    head = None
    for value in reversed(values): head = Node(value, head)
    return head
def book(): return Book('Emma', 3)
def adder(n): return lambda x: x + n
def naturals():
    n = 0
    while True:
        yield n
        n += 1
def views(): return {1: 2}.keys()
def tally(text): return collections.Counter(text)
def day(): return datetime.date(2024, 2, 29)
def queue(): return collections.deque([1, 2])
@contextlib.contextmanager
def opened(): yield 5
def builder(): return Builder().append('a')
"""


@pytest.mark.parametrize(
    "test",
    [
        "t = Trie()\nt.insert('abc')\nassert t.startswith('ab') and not t.startswith('b')\nassert 'abc' in t",
        "assert Builder().append('a').append('b').build() == 'ab'",
        "b = Builder()\nb.append('a')\nb = b.copy()\nassert len(b) == 1 and 'a' in b and b[:1] == list(b) == ['a']",
        "n = chain([1, 2])\nassert n and n.value == 1 and n.next.value == 2 and n.next.next is None",
        "found, n = [], chain([1, 2])\nwhile n:\n    found.append(n.value)\n    n = n.next\nassert found == [1, 2]",
        "b = book()\nassert b.title == 'Emma' and b.index == 3",
        "assert adder(2)(3) == 5 and Tools.count('abc') == 3",
        "import itertools\nassert list(itertools.islice(naturals(), 3)) == [0, 1, 2] and 7 in naturals()",
        "n = naturals()\nassert next(n) == 0 and next(n) == 1 and n",
        "assert set(views()) == {1} and len(views()) == 1 and 1 in views() and 2 not in views()",
        "q = queue()\nassert list(q) == [1, 2] and len(q) == 2 and q.popleft() == 1 and q.pop() == 2 and not q",
        "assert tally('aab').most_common(1) == [('a', 2)] and tally('ab') == {'a': 1, 'b': 1}",
        "import datetime\nassert day() == datetime.date(2024, 2, 29) and day().replace(day=1).day == 1",
        "with opened() as value:\n    assert value == 5",
        "b = builder()\nb.append('b')\nassert b.build() == 'ab' and ''.join(b) == 'ab'",
        "n = Node(1)\nn.next = Node(2)\nassert n.next.value == 2 and n == n and n != Node(1)",
        "from solution import chain as make\nassert make([4]).value == 4",
        "a, b = views(), adder\nassert [x for x in a] == [1] and sorted(a) == [1] and list(zip(a, 'x')) == [(1, 'x')]",
    ],
)
def test_objects_of_honest_programs_serve_as_they_would_in_one_process(box, test):
    exec(OBJECTS + test.replace("from solution import chain as make", "make = chain"), {})
    report = box.test(OBJECTS, [{"code": test}])
    assert report.outcomes == [{"test": 0, "passed": True}]


@pytest.mark.parametrize(
    ("test", "error"),
    [
        ("def check(candidate): assert candidate(1) == 1", "names no entry_point"),
        ("def test_f(request): assert f(1) == 1", "test_f takes arguments (request)"),
        ("def test_f():\n    yield f(1)", "test_f is a generator"),
        ("class TestF:\n    def test_f(self, value): assert f(1) == 1", "TestF.test_f takes arguments (value)"),
        ("import sys\ndef test_f(): assert f(1) == 2\nsys.exit(0)", "AssertionError"),
    ],
)
def test_what_looks_like_a_test_and_cannot_be_run_fails(box, test, error):
    (outcome,) = box.test("def f(x): return 1", [{"code": test}]).outcomes
    assert not outcome["passed"] and error in outcome["error"]


PARAMETRISED = """
import pytest
@pytest.mark.parametrize("pair", [(1, 2), pytest.param((2, 3), id="two")])
def test_pair(pair):
    assert f(pair[0]) == pair[1]
@pytest.mark.parametrize(["x", "y"], [(1, 2), (5, 6)])
def test_both(x, y): assert f(x) == y
class TestF:
    def setup_method(self): self.n = 3
    @pytest.mark.parametrize("more", [0, 1])
    def test(self, more): assert f(self.n + more) == 4 + more
"""


def test_parameters_of_pytest_are_given_to_the_tests(box):
    wrong = [f"def f(x): return x + 1 if x != {x} else 0" for x in (1, 2, 3, 4, 5)]
    assert [verdicts(box, program, PARAMETRISED) for program in ["def f(x): return x + 1", *wrong]] == [[True]] + [
        [False]
    ] * 5


def test_helpers_whose_names_begin_with_test_are_called_by_the_tests_alone(box):
    code = "def test_one(x, y):\n    assert f(x) == y\ntest_one(1, 1)\ndef test():\n    test_one(2, 1)"
    assert verdicts(box, "def f(x): return 1", code, code.replace("2, 1", "2, 2")) == [True, False]
    assert verdicts(box, "def f(x): return 1", "def check(f):\n    assert f(1) == 1\ncheck(f)", entry="f") == [True]


def test_a_builtin_may_be_tested_where_it_is_imported_from_the_program(box):
    test = "from solution import sum\nassert sum([1, 2]) == 12 and len('ab') == 2"
    assert verdicts(box, "def sum(x): return 12\ndef len(x): return 9", test) == [True]


def test_calls_give_back_values(box):
    calls = [{"call": "add", "args": [1, encode((2,))]}, {"call": "gen", "args": []}, {"call": "gone", "args": []}]
    program = "class Solution:\n    def add(self, a, b): return {a: b}\n    def gen(self): yield from 'ab'"
    for given in ("__import__('collections').deque('ab')", "dict(a=1, b=2).keys()", "map(str, 'ab')"):
        assert box.test(f"def f(): return {given}", [{"call": "f", "args": []}]).outcomes[0]["value"] == ["a", "b"]
    report = box.test(program, calls)
    assert report.outcomes[0] == {"test": 0, "value": {"dict": [[1, {"tuple": [2]}]]}}
    assert report.outcomes[1]["value"] == ["a", "b"]
    assert "defines no gone" in report.outcomes[2]["error"]


def test_only_a_name_that_every_test_calls_may_replace_a_builtin():
    def entries(*codes):
        return builtins_under_test([ast.parse(code) for code in codes])

    assert entries("assert sum(10, 15) == 6", "assert sum(1, 2) == 3") == {"sum"}
    assert entries("assert abs(f(1) - 2) < 1", "assert abs(f(2) - 2) < 1") == set()
    assert entries("assert sum(f(1)) == 6", "assert f(2) == 3") == set()
    assert entries("assert abs(max([1, 2]) - 2) < 1") == {"max"} and entries("assert len('ab') == 2") == {"len"}
    assert entries("import solution\nassert abs(solution.f(1)) < 1") == set()
    assert entries("from solution import f\nassert all(list(map(f, [1])))") == set()


def test_a_program_that_does_not_load_says_why(box):
    report = box.test("x = 1\nimport nothing_there", [{"code": "assert True"}])
    assert not report.loaded and report.outcomes == []
    assert report.load_error == {"name": "ModuleNotFoundError", "text": "No module named 'nothing_there'", "line": 2}
    assert box.test("def f(:", [{"code": "assert True"}]).load_error["line"] == 1
    assert box.test("raise SystemExit(0)", [{"code": "assert True"}]).load_error["name"] == "SystemExit"


def test_what_a_tested_program_prints_is_kept_apart(box):
    report = box.test("print('loading')\ndef f():\n    print('called')\n    return 1", [{"code": "assert f() == 1"}])
    assert report.stdout == "loading\ncalled\n" and report.outcomes == [{"test": 0, "passed": True}]
