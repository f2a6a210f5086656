"""Right programs with ordinary tests, each with a slip that makes it wrong: (name, program, tests, right text, slip).

They use what people's programs and tests use: classes, trees, exceptions, generators, coroutines, files in memory,
decorators, context managers, standard input. Nothing here was written for a certain way of judging.
"""

from __future__ import annotations

from typing import Any

ORDINARY: list[tuple[str, str, Any, str, str]] = []


def add(name: str, program: str, tests: Any, right: str, slip: str) -> None:
    assert program.count(right) >= 1, name
    ORDINARY.append((name, program.lstrip("\n"), tests.lstrip("\n") if isinstance(tests, str) else tests, right, slip))


add(
    "an account with its own errors",
    """
class InsufficientFunds(Exception):
    def __init__(self, needed, available):
        super().__init__(f"needed {needed}, have {available}")
        self.needed, self.available = needed, available

class Account:
    def __init__(self, owner, balance=0):
        self.owner, self.balance = owner, balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise InsufficientFunds(amount, self.balance)
        self.balance -= amount
        return self.balance
""",
    """
import unittest
from solution import Account, InsufficientFunds

class TestAccount(unittest.TestCase):
    def setUp(self):
        self.account = Account("ann", 100)

    def test_withdraw(self):
        self.assertEqual(self.account.withdraw(30), 70)
        self.assertEqual(self.account.balance, 70)

    def test_too_much(self):
        with self.assertRaises(InsufficientFunds) as caught:
            self.account.withdraw(500)
        self.assertEqual(caught.exception.needed, 500)
        self.assertIn("have 100", str(caught.exception))
        self.assertIsInstance(caught.exception, Exception)
""",
    "self.balance -= amount",
    "self.balance -= amount + 1",
)
add(
    "a tree that the program defines",
    """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right

def insert(root, val):
    if root is None:
        return TreeNode(val)
    if val < root.val:
        root.left = insert(root.left, val)
    else:
        root.right = insert(root.right, val)
    return root

def inorder(root):
    return inorder(root.left) + [root.val] + inorder(root.right) if root else []
""",
    """
root = None
for value in [5, 2, 8, 1, 9]:
    root = insert(root, value)
assert inorder(root) == [1, 2, 5, 8, 9]
assert root.left.val == 2 and root.right.right.val == 9
assert root.left.right is None
""",
    "if val < root.val:",
    "if val > root.val:",
)
add(
    "a tree that the tests define",
    """
class Solution:
    def invertTree(self, root):
        if root is None:
            return None
        root.left, root.right = self.invertTree(root.right), self.invertTree(root.left)
        return root
""",
    """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val = val
        self.left = left
        self.right = right

def build(values):
    nodes = [None if v is None else TreeNode(v) for v in values]
    kids = nodes[::-1]
    root = kids.pop()
    for node in nodes:
        if node:
            if kids: node.left = kids.pop()
            if kids: node.right = kids.pop()
    return root

def level_order(root):
    out, queue = [], [root]
    while queue:
        node = queue.pop(0)
        if node:
            out.append(node.val)
            queue += [node.left, node.right]
    return out

tree = build([4, 2, 7, 1, 3, 6, 9])
assert level_order(Solution().invertTree(tree)) == [4, 7, 2, 9, 6, 3, 1]
assert Solution().invertTree(None) is None
""",
    "self.invertTree(root.right), self.invertTree(root.left)",
    "self.invertTree(root.left), self.invertTree(root.right)",
)
add(
    "a linked list that the tests define, merged",
    """
class Solution:
    def mergeTwoLists(self, a, b):
        if not a or not b:
            return a or b
        if a.val > b.val:
            a, b = b, a
        a.next = self.mergeTwoLists(a.next, b)
        return a
""",
    """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

def make(values):
    head = None
    for v in reversed(values):
        head = ListNode(v, head)
    return head

def values(node):
    out = []
    while node:
        out.append(node.val)
        node = node.next
    return out

assert values(Solution().mergeTwoLists(make([1, 2, 4]), make([1, 3, 4]))) == [1, 1, 2, 3, 4, 4]
assert values(Solution().mergeTwoLists(make([]), make([0]))) == [0]
assert Solution().mergeTwoLists(None, None) is None
""",
    "if a.val > b.val:",
    "if a.val < b.val:",
)
add(
    "a stack in a class",
    """
class MinStack:
    def __init__(self):
        self._items = []

    def push(self, x):
        low = min(x, self._items[-1][1]) if self._items else x
        self._items.append((x, low))

    def pop(self):
        if not self._items:
            raise IndexError("pop from empty stack")
        return self._items.pop()[0]

    def get_min(self):
        return self._items[-1][1]

    def __len__(self):
        return len(self._items)

    def __bool__(self):
        return bool(self._items)
""",
    """
import pytest
from solution import MinStack

def test_min():
    s = MinStack()
    for x in (3, 1, 2):
        s.push(x)
    assert s.get_min() == 1 and len(s) == 3
    assert [s.pop(), s.pop()] == [2, 1]
    assert s.get_min() == 3

def test_empty():
    s = MinStack()
    assert not s
    with pytest.raises(IndexError, match="empty"):
        s.pop()
""",
    "min(x, self._items[-1][1])",
    "max(x, self._items[-1][1])",
)
add(
    "a generator of primes",
    """
def primes():
    found = []
    n = 2
    while True:
        if all(n % p for p in found):
            found.append(n)
            yield n
        n += 1
""",
    """
from itertools import islice, takewhile
import types
g = primes()
assert isinstance(g, types.GeneratorType)
assert next(g) == 2 and next(g) == 3
assert list(islice(g, 3)) == [5, 7, 11]
assert list(takewhile(lambda p: p < 20, primes())) == [2, 3, 5, 7, 11, 13, 17, 19]
""",
    "all(n % p for p in found)",
    "all(n % p for p in found[:1])",
)
add(
    "a generator that is sent values and closed",
    """
def running_mean():
    total, count, mean = 0.0, 0, None
    try:
        while True:
            value = yield mean
            total += value
            count += 1
            mean = total / count
    finally:
        log.append("closed")

log = []
""",
    """
g = running_mean()
next(g)
assert g.send(10) == 10
assert g.send(20) == 15
g.close()
assert log == ["closed"]
try:
    next(g)
    assert False, "it is closed"
except StopIteration:
    pass
""",
    "mean = total / count",
    "mean = total / (count + 1)",
)
add(
    "coroutines",
    """
import asyncio

async def double(x):
    await asyncio.sleep(0)
    return 2 * x

async def double_all(values):
    return await asyncio.gather(*(double(v) for v in values))
""",
    """
import asyncio
import unittest

class TestAsync(unittest.IsolatedAsyncioTestCase):
    async def test_one(self):
        self.assertEqual(await double(4), 8)

    async def test_many(self):
        self.assertEqual(await double_all([1, 2, 3]), [2, 4, 6])

assert asyncio.run(double_all(range(3))) == [0, 2, 4]
""",
    "return 2 * x",
    "return 2 + x",
)
add(
    "an asynchronous generator and context manager",
    """
import asyncio

class Resource:
    def __init__(self):
        self.events = []

    async def __aenter__(self):
        self.events.append("open")
        return self

    async def __aexit__(self, kind, error, trace):
        self.events.append("close")
        return False

    async def numbers(self, n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i
""",
    """
import asyncio

async def check():
    resource = Resource()
    got = []
    async with resource as r:
        async for x in r.numbers(3):
            got.append(x)
    return got, resource.events

assert asyncio.run(check()) == ([0, 1, 2], ["open", "close"])
""",
    "for i in range(n):",
    "for i in range(n + 1):",
)
add(
    "a vector with operators",
    """
class Vector:
    def __init__(self, *xs):
        self.xs = tuple(xs)

    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.xs, other.xs)))

    def __mul__(self, k):
        return Vector(*(k * a for a in self.xs))

    __rmul__ = __mul__

    def __neg__(self):
        return self * -1

    def __eq__(self, other):
        return isinstance(other, Vector) and self.xs == other.xs

    def __hash__(self):
        return hash(self.xs)

    def __getitem__(self, i):
        return self.xs[i]

    def __iter__(self):
        return iter(self.xs)

    def __repr__(self):
        return f"Vector{self.xs}"

    def __abs__(self):
        return sum(x * x for x in self.xs) ** 0.5
""",
    """
v, w = Vector(1, 2), Vector(3, 4)
assert v + w == Vector(4, 6)
assert 3 * v == v * 3 == Vector(3, 6)
assert -v == Vector(-1, -2)
assert abs(w) == 5.0
assert list(w) == [3, 4] and w[1] == 4
assert repr(v) == "Vector(1, 2)" and str(v) == "Vector(1, 2)"
assert len({v, Vector(1, 2), w}) == 2
a, b = v
assert (a, b) == (1, 2)
assert v != w and not v == "something else"
""",
    "a + b for a, b",
    "a - b for a, b",
)
add(
    "dataclasses, sorted and compared",
    """
from dataclasses import dataclass, field, replace

@dataclass(order=True)
class Version:
    major: int
    minor: int = 0
    tags: list = field(default_factory=list, compare=False)

    @classmethod
    def parse(cls, text):
        major, _, minor = text.partition(".")
        return cls(int(major), int(minor or 0))

    @property
    def text(self):
        return f"{self.major}.{self.minor}"
""",
    """
from dataclasses import asdict, is_dataclass
assert Version.parse("3.11") == Version(3, 11)
assert Version.parse("3") < Version.parse("3.1") < Version(4)
assert max([Version(1, 9), Version(1, 10)]).text == "1.10"
assert Version(1, 2, ["x"]) == Version(1, 2)
assert sorted([Version(2), Version(1)])[0].major == 1
assert str(Version(1)) == "Version(major=1, minor=0, tags=[])"
""",
    "int(minor or 0)",
    "int(minor or 1)",
)
add(
    "a named tuple and an enumeration",
    """
from collections import namedtuple
from enum import Enum

Point = namedtuple("Point", ["x", "y"])

class Direction(Enum):
    NORTH = (0, 1)
    EAST = (1, 0)

    def turned(self):
        return Direction.EAST if self is Direction.NORTH else Direction.NORTH

def move(point, direction, steps=1):
    dx, dy = direction.value
    return Point(point.x + steps * dx, point.y + steps * dy)
""",
    """
p = move(Point(1, 1), Direction.NORTH, 3)
assert p == (1, 4) and p.y == 4 and isinstance(p, Point) and isinstance(p, tuple)
assert p._replace(x=0) == Point(0, 4) and p._asdict() == {"x": 1, "y": 4}
assert Direction.NORTH.turned() is Direction.EAST
assert Direction["EAST"] == Direction.EAST and Direction((0, 1)).name == "NORTH"
assert [d.name for d in Direction] == ["NORTH", "EAST"]
""",
    "point.y + steps * dy",
    "point.y + dy",
)
add(
    "a decorator that counts",
    """
import functools

def counted(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)
    wrapper.calls = 0
    return wrapper

def retry(times, errors=(Exception,)):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            for attempt in range(times):
                try:
                    return fn(*args, **kwargs)
                except errors:
                    if attempt == times - 1:
                        raise
        return wrapper
    return decorate
""",
    """
@counted
def hello(name, *, loud=False):
    'Greets.'
    return name.upper() if loud else name

assert hello("a") == "a" and hello("b", loud=True) == "B"
assert hello.calls == 2 and hello.__name__ == "hello" and hello.__doc__ == "Greets."

attempts = []

@retry(3, (ValueError,))
def flaky():
    attempts.append(1)
    if len(attempts) < 3:
        raise ValueError("again")
    return "done"

assert flaky() == "done" and len(attempts) == 3

@retry(2)
def broken():
    raise KeyError("gone")

try:
    broken()
except KeyError as error:
    assert error.args == ("gone",)
else:
    raise AssertionError("it must raise")
""",
    "for attempt in range(times):",
    "for attempt in range(times - 1):",
)
add(
    "callbacks, with functions of the tests passed in",
    """
class Emitter:
    def __init__(self):
        self._handlers = {}

    def on(self, name, handler):
        self._handlers.setdefault(name, []).append(handler)
        return handler

    def emit(self, name, *args, **kwargs):
        return [handler(*args, **kwargs) for handler in self._handlers.get(name, [])]

def compose(*fns):
    def composed(x):
        for fn in reversed(fns):
            x = fn(x)
        return x
    return composed
""",
    """
seen = []
emitter = Emitter()
emitter.on("x", seen.append)
emitter.on("x", lambda value: value * 2)
assert emitter.emit("x", 5) == [None, 10] and seen == [5]
assert emitter.emit("unknown") == []
assert compose(str, lambda n: n + 1)(41) == "42"
assert sorted(["bb", "a"], key=compose(len)) == ["a", "bb"]
""",
    "for fn in reversed(fns):",
    "for fn in fns:",
)
add(
    "a context manager made by a generator",
    """
from contextlib import contextmanager

@contextmanager
def transaction(store):
    saved = dict(store)
    try:
        yield store
    except Exception:
        store.clear()
        store.update(saved)
        raise

class Timer:
    def __enter__(self):
        self.running = True
        return self

    def __exit__(self, *info):
        self.running = False
        return info[0] is ZeroDivisionError
""",
    """
store = {"a": 1}
with transaction(store) as s:
    s["b"] = 2
assert store == {"a": 1, "b": 2}
try:
    with transaction(store):
        store["a"] = 100
        raise RuntimeError("no")
except RuntimeError as error:
    assert str(error) == "no"
assert store == {"a": 1, "b": 2}
with Timer() as t:
    assert t.running
    1 / 0
assert t.running is False
""",
    "store.update(saved)",
    "store.update({})",
)
add(
    "output that is captured",
    """
import sys

def report(rows):
    for name, value in rows:
        print(f"{name:<6}|{value:>4}")
    print("done", file=sys.stderr)
""",
    """
import io
from contextlib import redirect_stdout, redirect_stderr
out, err = io.StringIO(), io.StringIO()
with redirect_stdout(out), redirect_stderr(err):
    report([("a", 1), ("bb", 22)])
assert out.getvalue() == "a     |   1\\nbb    |  22\\n"
assert err.getvalue() == "done\\n"
""",
    "{value:>4}",
    "{value:>5}",
)
add(
    "input that is patched",
    """
def ask(question):
    while True:
        answer = input(question).strip().lower()
        if answer in ("y", "n"):
            return answer == "y"
        print("please answer y or n")
""",
    """
from unittest.mock import patch
import io

with patch("builtins.input", side_effect=["maybe", " Y "]) as fake:
    with patch("sys.stdout", new_callable=io.StringIO) as out:
        assert ask("sure? ") is True
assert fake.call_count == 2
assert "please answer" in out.getvalue()
with patch("builtins.input", return_value="n"):
    assert ask("sure? ") is False
with patch("sys.stdin", io.StringIO("y\\n")):
    assert ask("") is True
""",
    'answer == "y"',
    'answer != "y"',
)
add(
    "a program that reads and writes numbers",
    """
import sys

def main():
    data = sys.stdin.read().split()
    n = int(data[0])
    values = list(map(int, data[1:n + 1]))
    print(sum(values))
    print(*sorted(values))

if __name__ == "__main__":
    main()
""",
    {"inputs": ["3\n3 1 2\n", "1\n7\n"], "outputs": ["6\n1 2 3\n", "7\n7\n"]},
    "print(*sorted(values))",
    "print(*values)",
)
add(
    "a program that asks line by line",
    """
t = int(input())
for case in range(t):
    a, b = map(int, input().split())
    word = input()
    print(f"Case {case + 1}: {word[a:b]}")
""",
    {"inputs": ["2\n0 2\nhello\n1 3\nworld\n"], "outputs": ["Case 1: he\nCase 2: or\n"]},
    "word[a:b]",
    "word[b:a]",
)
add(
    "abstract classes and inheritance",
    """
from abc import ABC, abstractmethod
import math

class Shape(ABC):
    count = 0

    def __init__(self):
        type(self).count += 1

    @abstractmethod
    def area(self): ...

    def __lt__(self, other):
        return self.area() < other.area()

class Square(Shape):
    def __init__(self, side):
        super().__init__()
        self.side = side

    def area(self):
        return self.side ** 2

class Circle(Shape):
    def __init__(self, radius):
        super().__init__()
        self.radius = radius

    def area(self):
        return math.pi * self.radius ** 2
""",
    """
import math
shapes = [Circle(2), Square(3), Circle(1)]
assert [type(s).__name__ for s in sorted(shapes)] == ["Circle", "Square", "Circle"]
assert isinstance(shapes[0], Shape) and issubclass(Square, Shape) and not isinstance(shapes[1], Circle)
assert math.isclose(sum(s.area() for s in shapes), 5 * math.pi + 9)
assert Circle.count == 2 and Square.count == 1 and Shape.count == 0
try:
    Shape()
    raise AssertionError("abstract")
except TypeError:
    pass
""",
    "return math.pi * self.radius ** 2",
    "return math.pi * self.radius",
)
add(
    "errors that are subclasses, chained and grouped in tuples",
    """
class ParseError(ValueError):
    def __init__(self, line, message):
        super().__init__(message)
        self.line = line

class EmptyError(ParseError): ...

def parse(text):
    if not text:
        raise EmptyError(0, "nothing to parse")
    out = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, sep, value = line.partition("=")
        if not sep:
            raise ParseError(number, f"line {number}: no '='")
        try:
            out[key.strip()] = int(value)
        except ValueError as error:
            raise ParseError(number, f"line {number}: not a number") from error
    return out
""",
    """
import unittest

class TestParse(unittest.TestCase):
    def test_right(self):
        self.assertDictEqual(parse("a = 1\\nb=2"), {"a": 1, "b": 2})

    def test_errors(self):
        with self.assertRaises(ValueError):
            parse("a")
        with self.assertRaisesRegex(ParseError, "line 2"):
            parse("a=1\\nb=x")
        try:
            parse("a=1\\nb=x")
        except (KeyError, ValueError) as error:
            self.assertEqual(error.line, 2)
            self.assertIsInstance(error.__cause__, ValueError)
        with self.assertRaises(ParseError) as caught:
            parse("")
        self.assertIs(type(caught.exception), EmptyError)
""",
    "enumerate(text.splitlines(), 1)",
    "enumerate(text.splitlines(), 0)",
)
add(
    "an iterator class and a mapping class",
    """
from collections.abc import MutableMapping

class Countdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n <= 0:
            raise StopIteration
        self.n -= 1
        return self.n + 1

class Lower(MutableMapping):
    def __init__(self, *args, **kwargs):
        self._data = {}
        self.update(*args, **kwargs)

    def __getitem__(self, key): return self._data[key.lower()]
    def __setitem__(self, key, value): self._data[key.lower()] = value
    def __delitem__(self, key): del self._data[key.lower()]
    def __iter__(self): return iter(self._data)
    def __len__(self): return len(self._data)
""",
    """
assert list(Countdown(3)) == [3, 2, 1]
assert sum(Countdown(4)) == 10 and max(Countdown(5)) == 5
assert 2 in Countdown(3)
d = Lower(A=1)
d["B"] = 2
assert d["b"] == 2 and "a" in d and len(d) == 2 and sorted(d) == ["a", "b"]
del d["A"]
assert dict(d) == {"b": 2} and d.get("zz", 7) == 7
assert list(d.items()) == [("b", 2)]
try:
    d["nope"]
    raise AssertionError
except KeyError:
    pass
""",
    "return self.n + 1",
    "return self.n",
)
add(
    "an LRU cache and a graph",
    """
from collections import OrderedDict, defaultdict, deque

class LRUCache:
    def __init__(self, capacity):
        self.capacity, self.data = capacity, OrderedDict()

    def get(self, key):
        if key not in self.data:
            return -1
        self.data.move_to_end(key)
        return self.data[key]

    def put(self, key, value):
        self.data[key] = value
        self.data.move_to_end(key)
        if len(self.data) > self.capacity:
            self.data.popitem(last=False)

class Graph:
    def __init__(self, edges):
        self.adjacent = defaultdict(set)
        for a, b in edges:
            self.adjacent[a].add(b)
            self.adjacent[b].add(a)

    def distance(self, start, goal):
        queue, seen = deque([(start, 0)]), {start}
        while queue:
            node, steps = queue.popleft()
            if node == goal:
                return steps
            for other in self.adjacent[node] - seen:
                seen.add(other)
                queue.append((other, steps + 1))
        return None
""",
    """
cache = LRUCache(2)
cache.put(1, 1); cache.put(2, 2)
assert cache.get(1) == 1
cache.put(3, 3)
assert cache.get(2) == -1 and cache.get(3) == 3
assert list(cache.data) == [1, 3]
g = Graph([(1, 2), (2, 3), (3, 4), (1, 5)])
assert g.distance(5, 4) == 4 and g.distance(1, 1) == 0 and g.distance(1, 99) is None
assert g.adjacent[1] == {2, 5} and isinstance(g.adjacent, dict)
""",
    "popitem(last=False)",
    "popitem(last=True)",
)
add(
    "numbers that are not integers, and exact ones",
    """
from decimal import Decimal
from fractions import Fraction
import math

def stats(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))

def exact(n):
    return Fraction(1, n) + Fraction(1, 2 * n), Decimal(n) / Decimal(8), 2 ** (10 * n), complex(n, -n)
""",
    """
from decimal import Decimal
from fractions import Fraction
import math
mean, deviation = stats([1.0, 2.0, 4.0])
assert math.isclose(mean, 7 / 3) and abs(deviation - 1.2472191) < 1e-6
third, eighth, big, z = exact(10)
assert third == Fraction(3, 20) and eighth == Decimal("1.25") and big == 2 ** 100 and z == 10 - 10j
assert isinstance(eighth, Decimal) and third.denominator == 20
assert math.isnan(stats([float("nan")])[0])
""",
    "Decimal(n) / Decimal(8)",
    "Decimal(n) / Decimal(9)",
)
add(
    "descriptors, slots and class methods",
    """
class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance, value):
        if value <= 0:
            raise ValueError(f"{self.name[1:]} must be positive")
        setattr(instance, self.name, value)

class Item:
    price = Positive()
    __slots__ = ("_price", "title")

    def __init__(self, title, price):
        self.title, self.price = title, price

    @staticmethod
    def cheaper(a, b):
        return a if a.price <= b.price else b

    @classmethod
    def free_of(cls, *titles):
        return [cls(title, 1) for title in titles]
""",
    """
a, b = Item("pen", 3), Item("ink", 2)
assert Item.cheaper(a, b) is b
b.price = 9
assert Item.cheaper(a, b) is a and a.title == "pen"
for wrong in (0, -1):
    try:
        a.price = wrong
        raise AssertionError("not rejected")
    except ValueError as error:
        assert "price must be positive" in str(error)
try:
    a.colour = "red"
    raise AssertionError("slots")
except AttributeError:
    pass
assert [item.title for item in Item.free_of("x", "y")] == ["x", "y"]
assert hasattr(a, "price") and not hasattr(a, "colour")
""",
    "if value <= 0:",
    "if value < 0:",
)
