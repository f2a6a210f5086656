"""Runs test code against a program that lives in another process, and gives one verdict per test.

The program cannot reach the verdict: it is not in this process, it never sees the tests or what they expect, and only
plain data comes from it. A test is `{"call": name, "args": [...]}`, whose value is given back, or
`{"code": text, "entry": name}`: asserts, `check(candidate)`, `test_...` functions or unittest cases.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from posttrain.sandbox.remote import Link, Remote
from posttrain.sandbox.supervise import Program
from posttrain.sandbox.values import decode

_FILE = "tests.py"
_USUAL = {"np": "numpy", "pd": "pandas"}
_MODULE = "solution"  # tests may import the program under this name
_TEXT = 300


def judge(program: Program, tests: list[dict[str, Any]], *, until_failure: bool) -> Iterator[dict[str, Any]]:
    """One outcome per test, in order; fewer when the program ended before, or at the first failure."""
    link = Link(program)
    builtin_entries = entries([test["code"] for test in tests if "code" in test])
    for number, test in enumerate(tests):
        try:
            outcome = _call(link, test) if "call" in test else _run(link, test, builtin_entries)
        except BaseException as error:
            outcome = {"passed": False, "error": _describe(error)}
        if program.gone:  # whatever the test made of that: `except Exception: pass` must not turn it into a success
            return
        yield {"test": number, **outcome}
        if until_failure and outcome.get("passed") is False:
            return


def entries(codes: list[str]) -> set[str]:
    """Names of Python's own functions that the tests mean as the program's: those that every test calls, if all do.

    `assert sum(10, 15) == 6` tests a program's `sum`; in `assert abs(f(1) - 2) < 1e-6` nobody may replace `abs`.
    """
    called = [_called(code) for code in codes]
    common = set.intersection(*called) if called else set()
    return {name for name in common if hasattr(builtins, name)} if all(_is_builtin(name) for name in common) else set()


def _call(link: Link, test: dict[str, Any]) -> dict[str, Any]:
    value = link.ask("call", test["call"], *[decode(arg) for arg in test["args"]])
    return {"value": link.out(list(value) if isinstance(value, Remote) else value)}


def _run(link: Link, test: dict[str, Any], builtin_entries: set[str]) -> dict[str, Any]:
    code, entry = test["code"], test.get("entry")
    tree = ast.parse(code, _FILE)
    space = _namespace(link, _names(tree) | ({entry} if entry else set()), _called(code), builtin_entries, entry)
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    given = set(space)
    try:
        exec(compile(tree, _FILE, "exec"), space)
        _run_functions(space, given, entry)
    except SystemExit as error:  # of the tests themselves (unittest.main): a program's never gets here
        if error.code not in (None, 0, False):
            raise AssertionError(f"the tests ended with {error.code}") from None
    return {"passed": True}


def _run_functions(space: dict[str, Any], given: set[str], entry: str | None) -> None:
    """Call what the test code has defined: check(candidate), test functions, unittest cases."""
    if callable(space.get("check")) and entry:
        space["check"](space[entry])
        return
    defined = {name: value for name, value in space.items() if name not in given}
    for name, value in defined.items():
        if name.startswith("test") and inspect.isfunction(value) and not inspect.signature(value).parameters:
            value()
    unittest = sys.modules.get("unittest")
    if unittest is None:
        return
    cases = [value for value in defined.values() if isinstance(value, type) and issubclass(value, unittest.TestCase)]
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)).run(result)
    if not result.wasSuccessful():
        case, text = (result.failures + result.errors)[0]
        raise AssertionError(f"{case}: {text.rstrip().rpartition(chr(10))[2]}")


def _namespace(
    link: Link, used: set[str], called: set[str], builtin_entries: set[str], entry: str | None
) -> dict[str, Any]:
    """What test code sees: stand-ins for the program's names, and real modules, which no program can replace."""
    space: dict[str, Any] = {"__name__": "tests"}
    wanted = []
    for name in sorted(used):
        if hasattr(builtins, name) and name not in builtin_entries and name != entry:
            continue
        if name not in called and (name in sys.stdlib_module_names or name in _USUAL):
            with contextlib.suppress(ImportError):
                space[name] = importlib.import_module(_USUAL.get(name, name))
        else:
            wanted.append(name)
    found = link.names(wanted)
    module = types.ModuleType(_MODULE)
    module.__dict__.update(found)
    sys.modules[_MODULE] = module
    if entry and entry not in found:
        found[entry] = Remote(link, entry)  # its error says that the program does not define it
    return {**space, **found}


def _names(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == _MODULE:
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == _MODULE:
            names.add(node.attr)
    return names


def _called(code: str) -> set[str]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return set()
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _is_builtin(name: str) -> bool:
    return hasattr(builtins, name)


def _describe(error: BaseException) -> str:
    """`AssertionError in: assert f(1) == 2`."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    line = (frames[-1].line or "").strip() if frames else ""
    return f"{text[:_TEXT]} in: {line[:_TEXT]}" if line else text[:_TEXT]
