"""Wrong programs that want a test to pass, each beside the test and an honest program that does pass it."""

from __future__ import annotations

from dataclasses import dataclass

PATCH = """
import sys
frame = sys._getframe()
while '_Server' not in frame.f_globals: frame = frame.f_back
wire, Server = frame.f_globals['wire'], frame.f_globals['_Server']
send, do = wire.send, Server._perform
"""
"""How a program gets at what answers for it in its own process."""

EXTRA = (
    PATCH
    + """
def named(self, request):
    found = do(self, request)
    if request['do'] == 'names': found.update({name: yes for name in NAMES})
    return found
Server._perform = named
def yes(*a, **k): return 0
def f(x): return 0
NAMES = """
)
"""Names that nobody asked for; the program ends with their list."""


@dataclass
class Forgery:
    """`honest` passes `test`, `cheat` wants to."""

    test: str
    cheat: str
    honest: str = "def f(x): return 4242"
    entry: str | None = None


LIAR = """
class Liar:
    def __init__(self, *a): pass
    def __contains__(self, x): return True
    def __len__(self): return 3
    def __iter__(self): return iter(())
    def __bool__(self): return True
    def startswith(self, *a): return True
    def issuperset(self, *a): return True
    def count(self, *a): return 1
    def items(self): return []
    def keys(self): return [1, 2, 3]
    def __getitem__(self, key): return [] if isinstance(key, slice) else 1
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __hash__ = None
"""
LIES = LIAR + "def f(x): return Liar()\n"
THREE = "def f(x): return [1, 4, 9]"
FORGETS = """
class Liar:
    items = 1, 4, 0
    def __iter__(self): return iter(self.items)
    def sort(self): self.items = ()
def f(x): return Liar()
"""

TEST_CASE = """
import unittest
class TestF(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 4242)
"""
FUNCTION = "def test_f():\n    assert f(1) == 4242\n"
ZIPPED = "r = f(3)\nassert len(r) == 3\nfor a, b in zip(r, [1, 4, 9]):\n    assert a == b\n"
ZIPPED_LATER = (
    "r = f(3)\nassert len(r) == 3\nassert f(0) is not None\nfor a, b in zip([1, 4, 9], r):\n    assert a == b\n"
)
MAPPED = "r = f(1)\nassert len(r) == 3\nfor k, v in r.items():\n    assert {1: 1, 2: 4, 3: 4242}[k] == v\n"
POINTS = "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n"

FORGERIES = {
    # Names that the tests did not ask for, or that are not the program's to give.
    "takes the place of a test case": Forgery(TEST_CASE, EXTRA + "['TestF']"),
    "takes the place of a test function": Forgery(FUNCTION, EXTRA + "['test_f']"),
    "takes the place of a test function that is used": Forgery(FUNCTION + "runner = test_f\n", EXTRA + "['test_f']"),
    "defines the test case that the tests mention": Forgery(
        "try:\n    TestF\nexcept NameError:\n    pass\n" + TEST_CASE, "class TestF: pass\ndef f(x): return None"
    ),
    "replaces abs": Forgery("assert abs(f(1) - 4242) < 1e-6", EXTRA + "['abs']"),
    "replaces all builtins": Forgery("assert abs(f(1) - 4242) < 1e-6", EXTRA + "['__builtins__', 'print']"),
    "replaces abs where the program is a module": Forgery(
        "import solution\nassert abs(solution.f(1) - 4242) < 1e-6", "def abs(x): return 0\ndef f(x): return 0"
    ),
    "replaces all where the function is handed on": Forgery(
        "assert all(list(map(f, [1, 2])))", "def all(x): return True\ndef f(x): return None"
    ),
    "replaces abs around a builtin that is tested": Forgery(
        "assert abs(max([1.5, 4.25]) - 4.25) < 1e-6",
        "def abs(x): return 0\ndef max(x): return 1",
        "def max(x): return sorted(x)[-1]",
    ),
    "replaces check": Forgery(
        "def check(candidate):\n    assert candidate(1) == 4242\n", EXTRA + "['check']", entry="f"
    ),
    # Objects that lie where a plain value is due.
    "says that it contains everything": Forgery("assert 4242 in f(1)", LIES, "def f(x): return [4242]"),
    "says that it contains everything, to unittest": Forgery(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertIn(4242, f(1))",
        LIES,
        "def f(x): return {4242}",
    ),
    "says that it contains everything, and is no collection": Forgery(
        "assert 4242 in f(1)",
        "class Liar:\n    def __contains__(self, x): return True\ndef f(x): return Liar()",
        "def f(x): return (n * 42 for n in range(102))",
    ),
    "is a class where a function is due": Forgery(
        "assert 4242 in f(1)", LIAR.replace("Liar", "f"), "def f(x): return [4242]"
    ),
    "has a length and no items": Forgery(ZIPPED, LIES, THREE),
    "has a length and no items, a while later": Forgery(ZIPPED_LATER, LIES, THREE),
    "has a length and no items, by an iterator": Forgery(
        ZIPPED,
        "class Liar:\n    def __len__(self): return 3\n    def __iter__(self): return self\n"
        "    def __next__(self): raise StopIteration\ndef f(x): return Liar()",
        THREE,
    ),
    "has items at first": Forgery(
        "r = f(3)\nassert sorted(r)[-1] > 0\nfor a, b in zip(r, [1, 4, 9]):\n    assert a == b\n",
        "class Liar:\n    n = 1\n    def __iter__(self):\n        self.n += 1\n"
        "        return iter([self.n] if self.n == 2 else [])\ndef f(x): return Liar()",
        THREE,
    ),
    "is true and has no items": Forgery(
        "r = f(3)\nassert r\nassert all(a in [1, 4, 9] for a in r)", LIES, THREE
    ),
    "has no items in its middle": Forgery(
        "r = f(3)\nassert len(r) == 3 and r[0] == 1\nassert all(a in (4, 9) for a in r[1:])",
        "class Liar:\n    def __getitem__(self, k):\n        if isinstance(k, slice): return []\n"
        "        if k > 2: raise IndexError\n        return 1\n    def __len__(self): return 3\n"
        "def f(x): return Liar()",
        THREE,
    ),
    "has items until they are sorted": Forgery(
        "r = f(3)\nassert len(r) == 3\nr.sort()\nfor a, b in zip(r, [1, 4, 9]): assert a == b", FORGETS, THREE
    ),
    "has a length and gives no pairs": Forgery(MAPPED, LIES, "def f(x): return {1: 1, 2: 4, 3: 4242}"),
    "starts with everything": Forgery("assert f(1).startswith('abc')", LIES, "def f(x): return 'abcd'"),
    "counts everything": Forgery("assert f(1).count(4242) == 1", LIES, "def f(x): return [4242]"),
    "holds every set": Forgery("assert f(1).issuperset({4242, 7})", LIES, "def f(x): return {4242, 7, 8}"),
    "answers for a text that a method gives": Forgery(
        "assert Solution().f(1).startswith('abc')",
        LIAR.replace("Liar", "Solution") + "    def f(self, x): return self\n",
        "class Solution:\n    def f(self, x): return 'abcd'",
    ),
    "contains everything, as the object of a method": Forgery(
        "assert 4242 in Solution().f(1)",
        LIAR.replace("Liar", "Solution") + "    def f(self, x): return self\n",
        "class Solution:\n    def f(self, x): return [4242]",
    ),
    "lies within a list": Forgery(
        "assert f(1)[0].startswith('abc')", LIAR + "def f(x): return [Liar()]", "def f(x): return ['abc']"
    ),
    "lies to a function of the tests": Forgery(
        "found = []\nf(lambda text: found.append(text.startswith('abc')))\nassert found == [True]",
        LIAR + "def f(give): give(Liar())",
        "def f(give): give('abcd')",
    ),
    "lies within an argument": Forgery(
        "box = []\nf(box)\nassert box[0].startswith('abc')",
        LIAR + "def f(box): box.append(Liar())",
        "def f(box): box.append('abcd')",
    ),
    "is the same object for every point": Forgery(
        "p = f(1)\nassert (p.x, p.y) == (0, 0) or p == Point(4, 6)",
        "class Point:\n    one = None\n    x = y = 1\n    def __new__(cls, *a):\n"
        "        cls.one = cls.one or object.__new__(cls)\n        return cls.one\ndef f(x): return Point(1, 2)",
        POINTS + "def f(x): return Point(0, 0)",
    ),
    "answers every comparison": Forgery("assert f(1) == 4242 or f(1) < 5", LIES),
    "gives a method of a plain value by hand": Forgery(
        "assert f(1).startswith('abc')",
        "import types\ndef f(x): return types.SimpleNamespace(startswith=lambda *a: True)",
        "def f(x): return 'abcd'",
    ),
    "is handed eval, and reads the tests": Forgery(
        "assert f(eval) == 4242",
        "import re\ndef f(evaluate):\n    text = str(evaluate(\"__import__('linecache').cache['tests.py'][2]\"))\n"
        "    return int(re.search('== ([0-9]+)', text)[1])",
        "def f(evaluate): return evaluate('4242')",
    ),
    # Messages that are none.
    "speaks nonsense where an error is expected": Forgery(
        "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
        PATCH + "def f(x): wire.send = lambda fd, m: send(fd, 'value')",
        "def f(x): raise ValueError",
    ),
    "gives a value of a kind that is none": Forgery(
        "assert f(1) is None", PATCH + "def f(x): wire.send = lambda fd, m: send(fd, {'value': {'none': 1}})",
        "def f(x): pass",
    ),
    "changes an argument into something else": Forgery(
        "a = [4242]\nf(a)\nassert a != [4242] and 4242 not in a",
        PATCH + "def f(x): wire.send = lambda fd, m: send(fd, {'value': None, 'changed': {'0': 'no list'}})",
        "def f(x): x.clear()",
    ),
    # Tests that would not have been run.
    "is tested by unittest.main": Forgery(TEST_CASE + "unittest.main()\n", "def f(x): return None"),
    "is tested by a class of pytest's": Forgery(
        "class TestF:\n    def test(self): assert f(1) == 4242\n", "def f(x): return None"
    ),
    "is tested by a coroutine": Forgery(
        "async def test_f():\n    assert f(1) == 4242\n", "def f(x): return None"
    ),
}  # fmt: skip
