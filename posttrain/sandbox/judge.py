"""Runs test code against a program that lives in another process, and gives one verdict per test.

The program cannot reach the verdict: it runs in another process, it never sees the tests or the expected values, and
only plain data and references come from it. A test is `{"call": name, "args": [...]}`, which returns a value, or
`{"code": text, "entry": name}`: asserts, `check(candidate)`, `test_...` functions or unittest cases.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import linecache
import sys
import traceback
import types
from collections import deque
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from posttrain.sandbox.cases import UnsupportedTest, call_allowing_exit, run_cases
from posttrain.sandbox.link import Link
from posttrain.sandbox.names import MODULE, USUAL, builtins_under_test, classify_names
from posttrain.sandbox.stand_ins import Super, is_stand_in
from posttrain.sandbox.supervise import Program
from posttrain.sandbox.surroundings import forward_library_calls, forward_patches, make_strict
from posttrain.sandbox.values import decode, encode, plain_base

_FILE = "tests.py"
_TEXT = 300
# A call may return these for a list, besides other iterators.
_LISTED = (GeneratorType, deque, type({}.keys()), type({}.values()), type({}.items()))


def judge(program: Program, tests: list[dict[str, Any]], free: Any, *, until_failure: bool) -> Iterator[dict[str, Any]]:
    """Yield one outcome per test, in order; fewer if the program ends early, or after the first failure.

    `free` lists the names that the program, by its own account, uses and does not define.
    """
    link = Link(program)
    nameless = [test["code"] for test in tests if "code" in test and not test.get("entry")]
    replaced = builtins_under_test([tree for code in nameless if (tree := _parse(code)) is not None])
    waiting: list[tuple[dict[str, Any], dict[type, str]]] = []
    for number, test in enumerate(tests):
        link.not_transferable = None
        try:
            outcome = _call(link, test) if "call" in test else _run(link, test, replaced, free)
        except BaseException as error:
            outcome = {"passed": False, "error": _describe(error), **_unjudged(link, error)}
        # This comes first: a test with `except Exception: pass` must not turn a broken channel into a success.
        if link.broken:
            outcome = {"passed": False, "error": link.broken[:_TEXT]}
        elif program.gone:
            break
        waiting.append(({"test": number, **outcome}, link.trust.take_unproven()))
        # A later test may show that an object was expected here. Until then the verdict on this test waits.
        while waiting and not link.trust.first_unproven(waiting[0][1]):
            yield waiting.pop(0)[0]
        if link.broken or (until_failure and outcome.get("passed") is False):
            break
    for outcome, unproven in waiting:
        why = link.trust.first_unproven(unproven)
        if why and outcome.get("passed"):
            why = f"{why}, and the tests do not show that they expect such an object"
            outcome = {"test": outcome["test"], "passed": False, "error": why, "unproven": True}
        yield outcome


def _call(link: Link, test: dict[str, Any]) -> dict[str, Any]:
    value = link.ask("call", test["call"], [decode(arg) for arg in test["args"]])
    listed = isinstance(value, _LISTED) or (is_stand_in(value) and plain_base(type(value)) is None)
    return {"value": encode(list(value) if listed else value)}


def _run(link: Link, test: dict[str, Any], replaced: set[str], free: Any) -> dict[str, Any]:
    code, entry = test["code"], test.get("entry")
    tree = _parse_code(code)
    main = types.ModuleType("__main__")
    space = main.__dict__
    space.update(_namespace(link, tree, entry, replaced))
    if "super" in code:
        space["super"] = _super
    forward_library_calls(tree, link)
    for what in ("warn", "log"):
        if what in code.lower():
            link.ask("report", None, (what,))
    if "mock" in code:
        forward_patches(importlib.import_module("unittest.mock"), link.surroundings)
    # As with `python tests.py`, so that `patch("__main__.f")` finds the function.
    sys.modules["__main__"] = main
    linecache.cache[_FILE] = (len(code), None, code.splitlines(keepends=True), _FILE)
    given = dict(space)
    link.offer(space, given, free)
    call_allowing_exit(exec, compile(tree, _FILE, "exec"), space)
    defined = {name: value for name, value in space.items() if name not in given or given[name] is not value}
    run_cases(tree, defined, given.get(entry) if entry else None)
    return {"passed": True}


def _namespace(link: Link, tree: ast.AST, entry: str | None, replaced: set[str]) -> dict[str, Any]:
    # Test code sees stand-ins for the program's names, and real modules, which a program cannot replace.
    names = classify_names(tree, entry, replaced)
    make_strict(tree, {USUAL.get(name, name) for name in names.modules})
    # As with `python tests.py`: tests below `if __name__ == "__main__":` run too.
    space: dict[str, Any] = {"__name__": "__main__", "__file__": _FILE}
    for name in names.modules:
        with contextlib.suppress(ImportError):
            space[name] = importlib.import_module(USUAL.get(name, name))
    found = link.names(sorted({*names.program, *names.imported}))
    if entry and entry not in found:
        # Calling it raises the error that the program does not define it.
        found[entry] = lambda *args, **options: link.ask("call", entry, args, options)
    module = _ProgramModule(MODULE)
    module.__dict__.update(_link=link, __all__=sorted(set(names.program) & set(found)))
    sys.modules[MODULE] = module
    return {**space, **{name: found[name] for name in names.program if name in found}}


class _ProgramModule(types.ModuleType):
    """The module that tests get from `import solution`: each access reads the program's current value."""

    def __getattr__(self, name: str) -> Any:
        found = self.__dict__["_link"].names([name]) if not name.startswith("__") else {}
        if name not in found:
            raise AttributeError(f"module {MODULE!r} has no attribute {name!r}")
        return found[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            return super().__setattr__(name, value)
        self.__dict__["_link"].surroundings.replace(MODULE, name, value, False)

    def __delattr__(self, name: str) -> None:
        self.__dict__["_link"].surroundings.replace(MODULE, name, None, True)


def _super(*args: Any) -> Any:
    # The tests' `super()`, which also works for classes that inherit from one of the program's.
    if not args:
        frame = sys._getframe(1)
        args = frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]]
    builtin: Any = super
    return Super(*args) if is_stand_in(args[0]) else builtin(*args)


def _unjudged(link: Link, error: BaseException) -> dict[str, Any]:
    # A failure of the judge, or a package that it lacks, must not count against the program.
    if link.not_transferable:
        return {"unjudged": True, "error": link.not_transferable[:_TEXT]}
    if isinstance(error, UnsupportedTest):
        return {"unjudged": True, "error": str(error)[:_TEXT]}
    frames = traceback.extract_tb(error.__traceback__)
    missing = error.name if isinstance(error, ModuleNotFoundError) and not is_stand_in(error) else None
    if missing and missing.partition(".")[0] != MODULE and any(frame.filename == _FILE for frame in frames):
        return {"unjudged": True, "error": f"the tests need {missing}, which is not installed"}
    return {}


def _parse(code: str) -> ast.AST | None:
    with contextlib.suppress(SyntaxError, ValueError):
        return _parse_code(code)
    return None


@functools.lru_cache(maxsize=64)
def _parse_code(code: str) -> ast.Module:
    return ast.parse(code, _FILE)


def _describe(error: BaseException) -> str:
    # Looks like `AssertionError in: assert f(1) == 2`.
    words = _text(error)
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    line = (frames[-1].line or "").strip() if frames else ""
    return f"{text[:_TEXT]} in: {line[:_TEXT]}" if line else text[:_TEXT]


def _text(error: BaseException) -> str:
    # The message may hold an object of the program (`assert f(1) == 2, f(1)`), whose `__str__` may raise.
    try:
        return str(error)
    except Exception:
        return ""
