"""More of `ordinary_programs.py`: decorators, callbacks, context managers, input and output, class hierarchies."""

from __future__ import annotations

from ordinary_programs import ORDINARY, add

__all__ = ["ORDINARY"]  # those of both files

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
