"""Runs test code against a program that lives in another process, and gives one verdict per test.

The program cannot reach the verdict: it is not in this process, it never sees the tests or what they expect, and only
plain data comes from it. A test is `{"call": name, "args": [...]}`, whose value is given back, or
`{"code": text, "entry": name}`: asserts, `check(candidate)`, `test_...` functions or unittest cases.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import linecache
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from posttrain.sandbox.cases import exits_well, run_cases
from posttrain.sandbox.link import Link
from posttrain.sandbox.names import MODULE, USUAL, builtins_under_test, names_of
from posttrain.sandbox.remote import Remote
from posttrain.sandbox.strict import make_strict
from posttrain.sandbox.supervise import Program
from posttrain.sandbox.values import decode

_FILE = "tests.py"
_TEXT = 300
_LISTED = (Remote, deque, type({}.keys()), type({}.values()), type({}.items()))
"""What a call may give for a list."""


def judge(program: Program, tests: list[dict[str, Any]], *, until_failure: bool) -> Iterator[dict[str, Any]]:
    """One outcome per test, in order; fewer when the program ended before, or at the first failure."""
    link = Link(program)
    nameless = [test["code"] for test in tests if "code" in test and not test.get("entry")]
    replaced = builtins_under_test([tree for code in nameless if (tree := _parse(code)) is not None])
    for number, test in enumerate(tests):
        try:
            outcome = _call(link, test) if "call" in test else _run(link, test, replaced)
        except BaseException as error:
            outcome = {"passed": False, "error": _describe(error)}
        # Whatever the test made of that: `except Exception: pass` must not turn it into a success.
        if link.broken:
            yield {"test": number, "passed": False, "error": link.broken[:_TEXT]}
        if link.broken or program.gone:
            return
        yield {"test": number, **outcome}
        if until_failure and outcome.get("passed") is False:
            return


def _call(link: Link, test: dict[str, Any]) -> dict[str, Any]:
    value = link.ask("call", test["call"], *[decode(arg) for arg in test["args"]])
    return {"value": link.out(list(value) if isinstance(value, _LISTED) else value)}


def _run(link: Link, test: dict[str, Any], replaced: set[str]) -> dict[str, Any]:
    code, entry = test["code"], test.get("entry")
    tree = ast.parse(code, _FILE)
    space = _namespace(link, tree, entry, replaced)
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    given = dict(space)
    exits_well(exec, compile(tree, _FILE, "exec"), space)
    defined = {name: value for name, value in space.items() if name not in given or given[name] is not value}
    run_cases(tree, defined, given.get(entry) if entry else None)
    return {"passed": True}


def _namespace(link: Link, tree: ast.AST, entry: str | None, replaced: set[str]) -> dict[str, Any]:
    """What test code sees: stand-ins for the program's names, and real modules, which no program can replace."""
    names = names_of(tree, entry, replaced)
    make_strict(tree, {USUAL.get(name, name) for name in names.modules})
    # As `python tests.py` would: tests below `if __name__ == "__main__":` are run as well.
    space: dict[str, Any] = {"__name__": "__main__", "__file__": _FILE}
    for name in names.modules:
        with contextlib.suppress(ImportError):
            space[name] = importlib.import_module(USUAL.get(name, name))
    found = link.names(sorted({*names.program, *names.imported}))
    if entry and entry not in found:
        found[entry] = Remote(link, entry, name=entry)  # its error says that the program does not define it
    module = types.ModuleType(MODULE)
    module.__dict__.update(found)
    sys.modules[MODULE] = module
    return {**space, **{name: found[name] for name in names.program if name in found}}


def _parse(code: str) -> ast.AST | None:
    with contextlib.suppress(SyntaxError, ValueError):
        return ast.parse(code)
    return None


def _describe(error: BaseException) -> str:
    """`AssertionError in: assert f(1) == 2`."""
    said = _text(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    line = (frames[-1].line or "").strip() if frames else ""
    return f"{text[:_TEXT]} in: {line[:_TEXT]}" if line else text[:_TEXT]


def _text(error: BaseException) -> str:
    """What an exception says; with an object of the program's in it (`assert f(1) == 2, f(1)`) that may fail."""
    try:
        return str(error)
    except Exception:
        return ""
