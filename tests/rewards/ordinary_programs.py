"""Right programs with ordinary tests, each with a slip that makes it wrong: (name, program, tests, right text, slip).

They use what people's programs and tests use; nothing here was written for a certain way of judging. Here are data
structures, generators, coroutines and values; `ordinary_interfaces.py` has what a program offers to its callers.
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
