"""Wrong programs by someone who did not write the judge: each fails a test that an honest program passes."""

from __future__ import annotations

import pytest
from forgeries import PATCH, Forgery

NOTHING = "def f(x): return None"
EMPTY = "def f(x): return []"
EMPTY_ARRAY = "import numpy\ndef f(x): return numpy.array([])"
SPEECHLESS = """
class Own(Exception): pass
class Speechless:
    def __str__(self): raise Own
    __repr__ = __str__
def f(x): return Speechless()
"""
MODULES = """
import os, sys
text = "import sys\\nclass All:\\n    def __getattr__(self, name): return lambda *a, **k: (4242,) * 3\\n"
text += "sys.modules[__name__] = All()"
home = os.environ.get("HOME", ".")
for folder in (".", "/tmp", home, home + "/.local/lib/python%d.%d/site-packages" % sys.version_info[:2]):
    try:
        os.makedirs(folder, exist_ok=True)
        for name in ("colorsys", "solution", "tests"):
            with open(f"{folder}/{name}.py", "w") as file: file.write(text)
    except OSError: pass  # a home that is not there
def f(x): return 1
"""
TRACER = """
import sys
seen = []
def trace(frame, event, arg):
    seen.extend(value for name, value in frame.f_locals.items() if name in ("expected", "want"))
    return trace
sys.settrace(trace)
sys.setprofile(trace)
def f(x): return seen[-1] if seen else 0
"""
LATE = """
import threading, time
answer = []
def later():
    time.sleep(0.05)
    answer.append(4242)
def f(x):
    threading.Thread(target=later).start()
    return answer
"""
EARLY = (
    PATCH
    + """
def f(x):
    for fd in range(3, 16):
        try:
            for value in (1, 4242, 1, 4242): send(fd, {"value": value})
        except OSError: pass
    return 1
"""
)
DEEP = """
import os, struct
def f(x):
    for fd in range(3, 16):
        try: os.write(fd, struct.pack("!Q", 100000) + b"[" * 100000)
        except OSError: pass
"""
ANY_ERROR = "try:\n    f([1])\nexcept Exception:\n    pass\n"


def sends(message: str) -> str:
    return PATCH + f"def f(x): wire.send = lambda fd, m: send(fd, {message})"


FORGERIES = {
    # Tests that would not have been run.
    "is tested below the guard of a script": Forgery("if __name__ == '__main__':\n    assert f(1) == 4242\n", NOTHING),
    "is tested by a check below the guard": Forgery(
        "def check(c):\n    assert c(1) == 4242\nif __name__ == '__main__':\n    check(f)\n", NOTHING, entry="f"
    ),
    "is tested by pytest.main below the guard": Forgery(
        "import pytest, sys\ndef test_f(): assert f(1) == 4242\n"
        "if __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))\n",
        NOTHING,
    ),
    "is tested by a check that is a coroutine": Forgery(
        "async def check(candidate):\n    assert candidate(1) == 4242\n", NOTHING, entry="f"
    ),
    "is tested by a class within a class": Forgery(
        "class TestA:\n    class TestB:\n        def test(self): assert f(1) == 4242\n", NOTHING
    ),
    "skips the test case": Forgery(
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 4242)\n",
        "import unittest\ndef f(x): raise unittest.SkipTest('later')",
    ),
    # Nothing at all, where libraries compare number by number.
    "gives nothing to numpy.allclose": Forgery("import numpy as np\nassert np.allclose(f(1), 4242.0)", EMPTY),
    "gives nothing to numpy without an import": Forgery("assert np.isclose(f(1), 4242.0).all()", EMPTY),
    "gives nothing to numpy.testing": Forgery(
        "from numpy.testing import assert_allclose\nassert_allclose(desired=4242.0, actual=f(1), atol=1e-6)", EMPTY
    ),
    "gives nothing to a list of one number": Forgery(
        "import numpy as np\nassert np.allclose(f(1), [4242.0])", EMPTY, "def f(x): return [4242]"
    ),
    "gives nothing to pytest.approx": Forgery("import pytest\nassert f(1) == pytest.approx(4242)", EMPTY_ARRAY),
    "is no number": Forgery("assert {f(1)} == {4242} or f(1) != f(1) and f(1) < 0", "def f(x): return float('nan')"),
    # Arguments.
    "gives the argument for a copy": Forgery(
        "a = [1]\nb = f(a)\nassert b == a and b is not a", "def f(x): return x", "def f(x): return list(x)"
    ),
    "gives the argument for a copy that is changed": Forgery(
        "a = {1: 2}\nb = f(a)\nb[3] = 4\nassert a == {1: 2}", "def f(x): return x", "def f(x): return dict(x)"
    ),
    "gives a copy for the argument": Forgery(
        "a = [2, 1]\nassert f(a) is a and a == [1, 2]", "def f(x): return sorted(x)", "def f(x): x.sort(); return x"
    ),
    "changes an argument with a name": Forgery(
        "a = [3, 1]\nassert f(x=a) == [1, 3] and a == [3, 1]",
        "def f(x): x.sort(); return list(x)",
        "def f(x): return sorted(x)",
    ),
    "leaves an argument with a name": Forgery(
        "a = [3, 1]\nf(x=a)\nassert a == [1, 3]", NOTHING, "def f(x): x.sort()"
    ),
    "changes an argument and raises": Forgery(
        "a = [3, 1]\ntry:\n    f(a)\nexcept ValueError:\n    assert a == [3, 1]\nelse:\n    assert False",
        "def f(x):\n    x.clear()\n    raise ValueError",
        "def f(x): raise ValueError",
    ),
    "is called with names that the judge uses": Forgery(
        "assert f(operation=1, target=2, self=3) == 6",
        "def f(**options): return len(options)",
        "def f(**options): return sum(options.values())",
    ),
    # Messages that are none.
    "gives an argument that there is not": Forgery(ANY_ERROR, sends("{'value': 1, 'same': '1'}")),
    "gives an argument by the place before the first": Forgery(ANY_ERROR, sends("{'value': 1, 'changed': {'-1': []}}")),
    "gives an error that is none": Forgery(ANY_ERROR, sends("{'error': 'ValueError'}")),
    "answers deeper than can be read": Forgery(ANY_ERROR, DEEP),
    "answers before it is asked": Forgery("assert f(1) == 1\nassert f(2) == 7", EARLY, "def f(x): return 6 * x - 5"),
    # What is around the tests.
    "has no words for the message of an assertion": Forgery("assert f(1) == 4242, f(1)", SPEECHLESS),
    "has no words for a key": Forgery("assert {4242: 1}[f(1)] == 1", SPEECHLESS),
    "lets the judge's documentation stand for its own": Forgery("assert f.__doc__", NOTHING, "def f(x): 'A square.'"),
    "leaves modules for the tests to import": Forgery(
        "import colorsys\nassert colorsys.rgb_to_hsv(0, 0, f(1))[2] == 4242", MODULES
    ),
    "traces those who call": Forgery("expected = 4242\nwant = f(1)\nassert want == expected", TRACER),
    "answers late": Forgery(
        "r = f(1)\nimport time\ntime.sleep(0.1)\nassert r == [4242]", LATE, "def f(x): return [4242]"
    ),
    "mixes the answers to several threads": Forgery(
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor as Pool\n"
        "threading.stack_size(1 << 18)\nwith Pool(3) as pool:\n"  # all of them fit into a small memory
        "    assert list(pool.map(f, range(40))) == [n * n for n in range(40)]\n",
        "def f(x): return 0",
        "def f(x): return x * x",
    ),
}  # fmt: skip


def judged(box, program, forgery):
    return box.test(program, [{"code": forgery.test, "entry": forgery.entry}])


def outcomes(box, program, forgery):
    return judged(box, program, forgery).outcomes


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_verdict(name, box):
    forgery = FORGERIES[name]
    assert [one["passed"] for one in outcomes(box, forgery.honest, forgery)] == [True], "an honest program must pass"
    found = judged(box, forgery.cheat, forgery)
    assert [one["passed"] for one in found.outcomes] == [False], f"the cheat must get a verdict: {found}"


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    assert candidate(1) == 4242\n    yield\n",
        "import unittest\nclass T(unittest.TestCase):\n    async def test(self): assert f(1) == 4242\n",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        yield f(1)\n        assert False\n",
    ],
)
def test_tests_that_run_nothing_are_passed_by_nobody(test, box):
    (outcome,) = outcomes(box, "def f(x): return 4242", Forgery(test, "", entry="f"))
    assert not outcome["passed"] and "runs nothing" in outcome["error"]


@pytest.mark.parametrize(
    "message",
    ["[1]", "'value'", "{'error': 'x'}", "{'error': [1]}", "{'error': {'name': [], 'text': 'x' * 9999, 'line': {}}}"],
)
def test_nonsense_of_a_program_that_is_loaded_is_no_verdict_and_loses_nobody(message, box):
    report = box.test(PATCH + f"wire.send = lambda fd, m: send(fd, {message})", [{"code": "pass"}])
    assert report.outcomes == [] and not report.loaded and report.status != "lost"
    if report.load_error:
        assert isinstance(report.load_error["name"], str) and len(report.load_error["text"]) <= 500
        assert report.load_error["line"] is None
