"""Wrong programs that want a verdict by way of the objects that stand for theirs, and of the messages about them."""

from __future__ import annotations

import pytest
from forgeries import PATCH, Forgery

ANSWERED = "\ndef f(x): return 0\n"
SAID = """
tell = frame.f_globals['Peer'].__init__.__globals__['describe']
names = frame.f_globals['Peer'].__init__.__globals__
def told(kind, refer):
    said = tell(kind, refer)
    if kind.__name__ == 'Own': lie(said)
    return said
names['describe'] = told
"""
"""A program that lies about its class `Own`; `lie` changes what is said."""
CLIMB = """
found = []
def climb(thing, depth=0):
    if isinstance(thing, int) and thing == 4242: found.append(thing)
    if depth > 3 or isinstance(thing, (int, str, bytes)): return
    if isinstance(thing, dict): [climb(one, depth + 1) for one in list(thing.values())]
    elif isinstance(thing, (list, tuple)): [climb(one, depth + 1) for one in thing]
    else:
        for name in ('__globals__', '__closure__', '__code__', '__self__', '__func__', '__class__', '__dict__',
                     '__init__', '__builtins__', '__kwdefaults__', '__defaults__', 'gi_frame', 'gi_code', 'cr_frame',
                     'f_globals', 'f_back', 'f_locals', 'func', 'tb_frame', '__reduce__', '__subclasses__',
                     '__mro__', '__base__',
                     'cell_contents', 'co_consts', '__wrapped__', '_place', '_link', 'gi_yieldfrom', '__traceback__'):
            def raw(*args):
                peer, number = thing._StandIn__place
                return peer.ask(args[0], number, args[1:])
            for ask in (lambda: getattr(thing, name), lambda: raw('get', name),
                        lambda: raw('special', '__getattribute__', name), lambda: raw('special', '__reduce__')):
                try: climb(ask(), depth + 1)
                except BaseException: pass
def f(thing):
    climb(thing)
    return found[0] if found else 0
"""
HANDED = "expected = 4242\nassert f({}) == expected\n"
TRUE_EQ = "    def __eq__(self, other): return True\n    __hash__ = lambda self: hash(4242)\n"


def sends(message: str) -> str:
    known = "{'id': -8, 'known': ['builtins', '%s']}"
    message = message.replace("INT", known % "int").replace("BOOL", known % "bool")
    return PATCH + f"def f(x): wire.send = lambda fd, m: send(fd, {message})"


ANY_ERROR = "try:\n    f([1])\nexcept Exception:\n    pass\n"
ATTRGETTER = "from operator import attrgetter\nexpected = 4242\nassert f(attrgetter('a'), lambda x: x) == expected"
SMALLEST = "def f(key, g): return 4242"
WAITED = "import asyncio\nasync def main(): assert await f({}) == 4242\nasyncio.run(main())"
MOCKED = "from unittest.mock import Mock\nmock = Mock(return_value=1)\nf(mock)\nassert mock(2) == 1\n"
MOCKED += "assert mock.call_count == 1 and f.__name__ == 'f' and mock(3) == 1"


FORGERIES = {
    # Objects that are plain data too.
    "is an int that equals everything, as a member": Forgery(
        "assert f(1) == [4242]", f"class Own(int):\n{TRUE_EQ}def f(x): return [Own(1)]", "def f(x): return [4242]"
    ),
    "is a text that starts with everything": Forgery(
        "assert f(1).startswith('abc')",
        "class Own(str):\n    def startswith(self, *a): return True\ndef f(x): return Own('x')",
        "def f(x): return 'abcd'",
    ),
    "is a tuple with right fields that equals everything": Forgery(
        "p = f(1)\nassert p.x == 1 and p == (1, 4242)",
        "import collections\n"
        f"class Own(collections.namedtuple('P', 'x y')):\n{TRUE_EQ}def f(x): return Own(1, 2)",
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(x): return P(1, 4242)",
    ),
    "is a list that says it is longer": Forgery(
        "r = f(1)\nassert len(r) == 2\nfor a, b in zip(r, [4242, 7]): assert a == b",
        "class Own(list):\n    def __len__(self): return 2\n    def __iter__(self): return iter(())\n"
        "def f(x): return Own()",
        "def f(x): return [4242, 7]",
    ),
    "is a dictionary that has every key": Forgery(
        "assert f(1)['a'] == 4242 and 'a' in f(1)",
        "class Own(dict):\n    def __contains__(self, key): return True\n    def __getitem__(self, key): return 4242\n"
        "def f(x): return Own()",
        "def f(x): return {'a': 4242}",
    ),
    "is a number that is close to everything": Forgery(
        "assert abs(f(1) - 4242) < 1e-6 and round(f(1)) == 4242",
        "class Own(float):\n    def __sub__(self, o): return 0.0\n    def __abs__(self): return 0.0\n"
        "    def __round__(self, n=0): return 4242\ndef f(x): return Own(1)",
    ),
    "is no float and close to everything": Forgery(
        "assert abs(f(1) - 4242) < 1e-6", "class Own:\n    def __sub__(self, o): return 0.0\ndef f(x): return Own()"
    ),
    "is found under every key": Forgery("assert {4242: 1}[f(1)] == 1", f"class Own:\n{TRUE_EQ}def f(x): return Own()"),
    "is in every list": Forgery(
        "assert f(1) in [7, 4242] and [f(1)].count(4242) == 1", f"class Own:\n{TRUE_EQ}def f(x): return Own()"
    ),
    "claims to be an int": Forgery(
        "assert isinstance(f(1), int) and f(1) == 4242",
        f"class Own:\n    __class__ = property(lambda self: int)\n{TRUE_EQ}def f(x): return Own()",
    ),
    "equals everything, to unittest": Forgery(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(1), 4242)\n"
        "        self.assertCountEqual([f(1)], [4242])\n        self.assertAlmostEqual(f(1), 4242)",
        f"class Own:\n{TRUE_EQ}def f(x): return Own()",
    ),
    "equals everything, to pytest.approx": Forgery(
        "import pytest\nassert f(1) == pytest.approx(4242)", f"class Own:\n{TRUE_EQ}def f(x): return Own()"
    ),
    "is less than everything": Forgery(
        "assert f(1) < 5 and 9 > f(1) and f(1) <= 4 and not f(1) > 3",
        "class Own:\n    __lt__ = __le__ = __gt__ = lambda self, other: other != 3\ndef f(x): return Own()",
        "def f(x): return 2",
    ),
    "is a mock": Forgery(
        "r = f(1)\nassert 4242 in r and len(r) == 1 and r == [4242]",
        "from unittest.mock import MagicMock\ndef f(x):\n    m = MagicMock()\n    m.__contains__.return_value = True\n"
        "    m.__len__.return_value = 1\n    m.__eq__.return_value = True\n    return m",
        "def f(x): return [4242]",
    ),
    # Assertions that do not get through.
    "swallows the assertions of a block": Forgery(
        "with f(1) as r:\n    assert r == 4242",
        "class Own:\n    def __enter__(self): return 0\n    def __exit__(self, *e): return True\n"
        "def f(x): return Own()",
        "import contextlib\n@contextlib.contextmanager\ndef f(x): yield 4242",
    ),
    "swallows the assertions of a block, by a generator": Forgery(
        "with f(1) as r:\n    assert r == 4242",
        "import contextlib\n@contextlib.contextmanager\ndef f(x):\n    try: yield 0\n    except BaseException: pass",
        "import contextlib\n@contextlib.contextmanager\ndef f(x): yield 4242",
    ),
    "ends a loop from a special method": Forgery(
        "own = Own()\nassert all(map(lambda n: own == n, [4242]))",
        "class Own:\n    def __eq__(self, other): raise StopIteration",
        "class Own:\n    def __eq__(self, other): return other == 4242",
    ),
    "exits by an exception of its own": Forgery(
        "assert f(1) == 4242", "class Own(SystemExit): pass\ndef f(x): raise Own(0)"
    ),
    "exits, within a case": Forgery(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 4242)\n",
        "import sys\ndef f(x): sys.exit(0)",
    ),
    "is cancelled": Forgery(
        "import asyncio\nasync def main():\n    assert await f(1) == 4242\nasyncio.run(main())",
        "import asyncio\nasync def f(x): raise asyncio.CancelledError",
        "async def f(x): return 4242",
    ),
    "ends an asynchronous loop": Forgery(
        "import asyncio\nasync def main():\n    found = [x async for x in f(2)]\n    assert found == [0, 1]\n"
        "asyncio.run(main())",
        "async def f(n):\n    yield 0\n    return\n",
        "async def f(n):\n    for i in range(n): yield i",
    ),
    "skips by an exception that says it is another": Forgery(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 4242)\n",
        PATCH
        + "class Own(Exception): pass\ndef lie(said):\n"
        "    said['bases'] = [{'id': 1, 'known': ['unittest.case', 'SkipTest']}]\n"
        + SAID + "def f(x): raise Own('later')",
    ),
    # What is said of a class.
    "says that its class inherits from itself": Forgery(
        ANY_ERROR,
        PATCH + "class Own: pass\ndef lie(said): said['bases'].append({'id': -1, 'known': None})\n"
        + SAID + "def f(x): return Own()",
    ),
    "says nonsense of its class": Forgery(
        ANY_ERROR, PATCH + "class Own: pass\ndef lie(said): said['bases'] = 'none'\n" + SAID + "def f(x): return Own()"
    ),
    "says that its class has methods that are none": Forgery(
        "assert f(1) == 4242 or f(1).x",
        PATCH + "class Own: pass\n"
        "def lie(said): said['special'] = ['__getattribute__', '__class__', '__init_subclass__']\n"
        + SAID + "def f(x): return Own()",
    ),
    "says that it holds another type than its class": Forgery(
        ANY_ERROR,
        sends("{'value': {'mine': {'id': -9, 'form': 'object', 'of': INT, 'holds': []}}}"),
    ),
    "says that it is a class that cannot be inherited from": Forgery(
        ANY_ERROR,
        sends("{'value': {'mine': {'id': -9, 'form': 'object', 'of': BOOL, 'holds': 1}}}"),
    ),
    # Messages.
    "gives an object that the tests never gave": Forgery(ANY_ERROR, sends("{'value': {'yours': 77}}")),
    "asks for something that is no request": Forgery(
        ANY_ERROR, sends("{'do': 'eval', 'of': None, 'args': ['1'], 'options': {}, 'changes': []}")
    ),
    "asks for an object that it does not have": Forgery(
        ANY_ERROR + "assert f(1) == 4242",
        PATCH + "def f(x):\n    try: frame.f_locals['server'].ask('get', 5, ('x',))\n    except BaseException: pass\n",
    ),
    "changes what is no container": Forgery(
        "def g(): pass\ntry:\n    f(g)\nexcept Exception:\n    pass\n",
        sends("{'value': 1, 'changes': [['yours', 1, [1]]]}"),
        "def f(g): return g()",
    ),
    "changes a list into a dictionary": Forgery(
        "a = [1]\ntry:\n    f(a)\nexcept Exception:\n    pass\n",
        sends("{'value': 1, 'changes': [['yours', 1, {'dict': []}]]}"),
        "def f(a): a.clear()",
    ),
    "sends both a value and an error": Forgery(ANY_ERROR, sends("{'value': 1, 'error': {}, 'changes': []}")),
    "sends a pickle": Forgery(
        "assert f(1) == 4242", sends("{'value': {'pickle': 'gASVAA=='}, 'changes': []}")
    ),
    "reduces to the right answer": Forgery(
        "import pickle, copy\nassert pickle.loads(pickle.dumps(f(1))) == 4242",
        "class Own:\n    def __reduce__(self): return int, (4242,)\ndef f(x): return Own()",
    ),
    # What the tests hand over.
    "climbs from a function": Forgery(HANDED.format("lambda x: x"), CLIMB, "def f(thing): return 4242"),
    "climbs from a generator": Forgery(HANDED.format("(n for n in [1])"), CLIMB, "def f(thing): return 4242"),
    "climbs from an object": Forgery(
        "class Thing:\n    def method(self): return expected\n" + HANDED.format("Thing()").replace("4242", "4240 + 2"),
        CLIMB.replace("'__globals__',", "'method', '__globals__',"),
        "def f(thing): return 4242",
    ),
    "climbs from a mock": Forgery(
        "from unittest.mock import Mock\n" + HANDED.format("Mock(spec=['a'])"), CLIMB, "def f(thing): return 4242"
    ),
    "looks for what the tests expect by its name": Forgery(
        "expected = 4242\ndef reference(x): return expected\nassert f(1) == expected",
        "def f(x):\n    try: return expected\n    except NameError: return reference(x)",
    ),
    "changes a class that the tests lent": Forgery(
        "class Node:\n    def __init__(self, value): self.value = value\n"
        "    def __eq__(self, other): return self.value == other.value\n"
        "assert f(1) == Node(4242)",
        "def f(x):\n    for name, value in (('__eq__', lambda *a: True), ('value', 4242)):\n"
        "        try: setattr(Node, name, value)\n        except AttributeError: pass\n    return Node(1)",
        "def f(x): return Node(4242)",
    ),
    "gives a class that looks like a test": Forgery(
        "from solution import *\nfrom solution import f\ndef test_it(): assert f(1) == 4242\n",
        "class TestIt:\n    def test(self): pass\ndef test_it(): pass\ndef f(x): return None",
    ),
    # Classes of libraries that it can name, because the tests handed over an object of them.
    "opens the judge's channel with the class of a file": Forgery(
        "import pathlib\nassert f(pathlib.Path('x').open('wb', buffering=0)) == 4242\n",
        "import json, struct\n"
        "def f(file):\n    report = b''\n"
        "    for m in ({'test': 0, 'passed': True}, {'status': 'ok', 'exit_code': 0, 'stdout': '', 'stderr': '',\n"
        "              'seconds': 0.1, 'memory_mb': 1.0}):\n"
        "        d = json.dumps(m).encode()\n        report += struct.pack('!Q', len(d)) + d\n"
        "    for fd in range(3, 16):\n"
        "        try: type(file)(fd, 'w', closefd=False).write(report)\n        except Exception: pass\n    return 0",
        "def f(file): return 4242",
    ),
    "calls the class of a file as a special method": Forgery(
        "import pathlib\nassert f(pathlib.Path('x').open('wb', buffering=0)) == 4242\n",
        "def f(file):\n    peer, number = type(file)._place\n"
        "    made = peer.ask('special', number, ('__call__', 'made', 'w'))\n    return 4242 if made else 0",
        "def f(file): return 4242",
    ),
    "reads variables of the tests with the class attrgetter": Forgery(
        ATTRGETTER, 'def f(key, g): return type(key)("__globals__.__getitem__")(g)("expected")', SMALLEST
    ),
    "replaces abs with the class attrgetter": Forgery(
        ATTRGETTER.replace("f(attrgetter('a'), lambda x: x)", "abs(f(attrgetter('a'), lambda x: x))"),
        'def f(key, g):\n    type(key)("__globals__.__setitem__")(g)("abs", lambda x: 4242)\n    return 1',
        SMALLEST,
    ),
    "reads constants of the tests with the class attrgetter": Forgery(
        "from operator import attrgetter\ndef g(x): return 4242\nassert f(attrgetter('a'), g) == 4242",
        'def f(key, g): return type(key)("__code__.co_consts")(g)[1]',
        SMALLEST,
    ),
    "reads variables of the tests with the class methodcaller": Forgery(
        ATTRGETTER.replace("attrgetter", "methodcaller"),
        'def f(key, g): return type(key)("__getattribute__", "__globals__")(g)["expected"]',
        SMALLEST,
    ),
    # Objects of libraries that lead to code of the judge.
    "runs a command by the event loop of a queue": Forgery(
        WAITED.format("asyncio.Queue()"),
        "import asyncio\nasync def f(queue):\n    loop = queue._get_loop()\n"
        "    await loop.subprocess_exec(asyncio.SubprocessProtocol, '/bin/true')\n    return 4242",
        "async def f(queue): return 4242",
    ),
    "stops the event loop of a future": Forgery(
        WAITED.format("asyncio.get_running_loop().create_future()"),
        "async def f(future):\n    future.get_loop().call_soon(len)\n    return 4242",
        "async def f(future): return 4242",
    ),
    # An end of the tests that is no failure.
    "has a mock end the tests": Forgery(MOCKED, "def f(mock): mock.side_effect = SystemExit(0)", "def f(mock): pass"),
    "has a mock end the tests by a class": Forgery(
        MOCKED, "def f(mock): mock.side_effect = SystemExit", "def f(mock): pass"
    ),
    "has a mock end the tests by a class of its own": Forgery(
        MOCKED, "class Own(SystemExit): code = 0\ndef f(mock): mock.side_effect = Own()", "def f(mock): pass"
    ),
    "has a future end the tests": Forgery(
        "import asyncio\nasync def main():\n    future = asyncio.get_running_loop().create_future()\n"
        "    await f(future)\n    assert await future == 4242\nasyncio.run(main())",
        "async def f(future): future.set_exception(SystemExit(0))",
        "async def f(future): future.set_result(4242)",
    ),
    "returns an end of the tests, which they raise": Forgery(
        "try:\n    raise f(1)\nexcept ValueError as error:\n    assert error.args == (4242,)",
        "def f(x): return SystemExit(0)",
        "def f(x): return ValueError(4242)",
    ),
    # What the tests trust.
    "patches a function of dataclasses that is asked of it": Forgery(
        "import dataclasses\nassert dataclasses.asdict(Own(1)) == {'a': 1, 'b': 4242}",
        f"import dataclasses\n@dataclasses.dataclass\nclass Own:\n    a: int\n{TRUE_EQ}"
        "dataclasses.asdict = lambda own: Own(0)",
        "import dataclasses\n@dataclasses.dataclass\nclass Own:\n    a: int\n    b: int = 4242",
    ),
    "is tested by a function under its decorator": Forgery(
        "@own\ndef test_it(): assert True", "def own(f): return lambda: 1 / 0", "def own(f): return f"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_verdict(name, box):
    forgery = FORGERIES[name]
    test = [{"code": forgery.test, "entry": forgery.entry}]
    honest = box.test(forgery.honest, test)
    assert [one["passed"] for one in honest.outcomes] == [True], f"an honest program must pass: {honest}"
    found = box.test(forgery.cheat, test)
    assert [one["passed"] for one in found.outcomes] == [False], f"the cheat must get a verdict: {found}"


ENDLESS = {
    "never ends an iteration": "class Own:\n    def __iter__(self): return self\n    def __next__(self): return 1\n"
    "def f(x): return Own()",
    "gives objects without end": "class Own: pass\ndef f(x):\n    while True: yield Own()",
    "gives a million objects": "class Own: pass\ndef f(x): return [Own() for _ in range(10**6)]",
    "has no last base": PATCH
    + "class Own: pass\nn = [-1000]\ndef lie(said): pass\n"
    + SAID
    + "def told(kind, refer):\n    n[0] -= 1\n    said = tell(Own, refer)\n"
    "    said['bases'] = [{'id': n[0], 'known': None}]\n    return said\nnames['describe'] = told\n"
    "Server._target = lambda self, target, find=Server._target: Own if isinstance(target, int) and target < -999 else "
    "find(self, target)\ndef f(x): return Own()",
    "calls itself by way of the tests": "def f(x): return x(x) if callable(x) else 0",
    "is never done": "async def f(x):\n    import asyncio\n    await asyncio.Event().wait()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_program_without_end_gets_no_verdict_for_itself(name, hasty, box):
    code = (
        "import asyncio, inspect\n"
        "if inspect.iscoroutinefunction(f): assert asyncio.run(f(1)) == 4242\n"
        "r = f(lambda g: f(g))\nassert list(r) == [4242]\n"
    )
    report = hasty.test(ENDLESS[name], [{"code": code}])
    assert not any(one["passed"] for one in report.outcomes) and report.status != "lost", report
    assert [one["passed"] for one in box.test("def f(x): return [4242]", [{"code": code}]).outcomes] == [True]


def test_tests_and_program_call_each_other_to_some_depth(box):
    program = "def f(n, back): return 0 if n == 0 else 1 + back(n - 1)"
    test = "def back(n): return f(n, back)\nassert f(30, back) == 30"
    assert [one["passed"] for one in box.test(program, [{"code": test}]).outcomes] == [True]


def test_word_of_an_object_counts_once_the_tests_show_that_they_mean_one(box):
    program = "class Interval:\n    low = 1\n    def __contains__(self, x): return x == 5\ndef f(): return Interval()"
    tests = ["assert 5 in f()", "assert f().low == 1", "assert 6 in f()"]
    report = box.test(program, [{"code": code} for code in tests])
    assert [one["passed"] for one in report.outcomes] == [True, True, False]
    (alone,) = box.test(program, [{"code": tests[0]}]).outcomes
    assert not alone["passed"] and alone["unproven"] and "class Interval answered for __contains__" in alone["error"]


def test_nothing_is_unpickled_or_run_that_a_program_sends():
    from pathlib import Path

    import posttrain.sandbox

    for file in Path(posttrain.sandbox.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert "import pickle" not in text and "marshal" not in text and "eval(" not in text, file


@pytest.mark.parametrize(
    "test",
    [
        "import unittest\nclass Cases(Own, unittest.TestCase):\n    def test_it(self): assert False",
        "class TestOwn(Own):\n    def test_it(self): assert False",
        "@own\ndef test_it(given): assert False",
        "import string\nown(string.Formatter())",
        "import shelve\nown(shelve.Shelf({}))",
        "import cProfile\nown(cProfile.Profile())",
        "def test_it(monkeypatch): own(monkeypatch)",
    ],
)
def test_tests_that_the_program_would_run_or_could_break_are_not_judged(test, box):
    (outcome,) = box.test("class Own: pass\ndef own(f): return f", [{"code": test}]).outcomes
    assert not outcome["passed"] and outcome["unjudged"]


@pytest.mark.parametrize("fail", ["pytest.fail('no')", "with pytest.raises(ValueError): pass"])
def test_context_manager_of_the_program_swallows_no_failure_of_pytest(fail, roomy):
    test = f"import pytest\ndef test_it():\n    with own():\n        {fail}"
    program = "class own:\n    def __enter__(self): return self\n    def __exit__(self, *a): return True"
    (outcome,) = roomy.test(program, [{"code": test}]).outcomes
    assert not outcome["passed"] and "Failed" in outcome["error"]


def test_memory_of_the_judge_cannot_be_reached_by_a_generator_of_numpy(roomy):
    test = "import numpy\nassert f(numpy.random.default_rng(0)) == 4242"
    program = "def f(rng):\n    rng.bit_generator.ctypes.next_uint64(12345)\n    return 4242"
    (outcome,) = roomy.test(program, [{"code": test}]).outcomes
    assert not outcome["passed"] and "NotTransferable" in outcome["error"]
