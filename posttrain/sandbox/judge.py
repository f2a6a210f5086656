"""Runs test code against a program that lives in another process, and gives one verdict per test.

The program cannot reach the verdict: it runs in another process, it never sees the tests or the expected values, and
only plain data and references come from it. A test is `{"call": name, "args": [...]}`, which returns a value, or
`{"code": text, "entry": name}`: asserts, `check(candidate)`, `test_...` functions or unittest cases, with the fixtures
that they take. A test that cannot be run is a failure: if it were skipped, every program would pass it.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import importlib
import inspect
import io
import linecache
import sys
import tempfile
import traceback
import types
import unittest
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

from posttrain.sandbox.link import Link, ProgramExit
from posttrain.sandbox.names import (
    MODULE,
    USUAL,
    builtins_under_test,
    classify_names,
    loaded_names,
    names_only_in_annotations,
)
from posttrain.sandbox.stand_ins import Super, is_stand_in
from posttrain.sandbox.supervise import Program
from posttrain.sandbox.surroundings import forward_library_calls, forward_patches, forward_seeds, make_strict
from posttrain.sandbox.wire import decode, encode, plain_base

_FILE = "tests.py"
_TEXT = 300
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
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
    if "seed" in code:
        forward_seeds(link, "np" in code or "numpy" in code)
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
    # Not with this file's own future: the tests' annotations are objects, unless they name something undefined.
    flags = __future__.annotations.compiler_flag if names_only_in_annotations(tree) - space.keys() else 0
    call_allowing_exit(exec, compile(tree, _FILE, "exec", flags, dont_inherit=True), space)
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


unittest.main = lambda *_, **__: None  # pyright: ignore  # the cases are run here; it would look for them elsewhere


class UnsupportedTest(TypeError):
    """A test that this judge cannot run."""


def run_cases(tree: ast.AST, defined: dict[str, Any], entry: Any) -> None:
    """Raise what the first failing test raises. `defined` holds what the test code has bound, by name."""
    used = loaded_names(tree)
    check = defined.get("check")
    if inspect.isfunction(check) and "check" not in used:
        if entry is None:
            raise UnsupportedTest("the tests define check(), and the truth names no entry_point to give to it")
        _run_once("check", functools.partial(check, entry))
        return
    statements = {node.name: node for node in getattr(tree, "body", []) if isinstance(node, _DEFINITIONS)}
    for name, value in defined.items():
        if is_stand_in(value):
            # It belongs to the program, even if its name begins with `test`, unless the tests define it.
            _run_made_by_program(name, value, statements.get(name), used)
            continue
        if (
            inspect.isfunction(value)
            and name.startswith("test")
            and (name not in used or not _required_arguments(value))
        ):
            _run_function(name, value, defined)
        elif isinstance(value, type) and not issubclass(value, unittest.TestCase) and name.startswith("Test"):
            _run_class(value, defined)
    _run_unittest([one for one in defined.values() if isinstance(one, type) and issubclass(one, unittest.TestCase)])


def _run_made_by_program(name: str, value: Any, statement: Any, used: set[str]) -> None:
    # A test function under a decorator of the program, or a test class that inherits from a class of the program.
    if isinstance(statement, ast.ClassDef):
        bases = name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in statement.bases)
        if bases and any(getattr(one, "name", "").startswith("test") for one in statement.body):
            raise UnsupportedTest(f"{name} inherits from a class of the program, which would run its tests")
    elif statement is not None and name.startswith("test") and name not in used:
        given = statement.args
        if len(given.posonlyargs + given.args) > len(given.defaults) or None in given.kw_defaults:
            raise UnsupportedTest(f"{name} takes arguments, and its decorator is one of the program")
        _run_once(name, value)


def call_allowing_exit(function: Callable[..., Any], *args: Any) -> Any:
    # `sys.exit()` of the tests themselves is no failure unless its code says so. That of the program is a ProgramExit.
    try:
        return function(*args)
    except ProgramExit:
        raise
    except SystemExit as error:
        if error.code not in (None, 0, False):
            raise AssertionError(f"the tests ended with {error.code}") from None


def _run_function(
    name: str, function: Callable[..., Any], defined: dict[str, Any], fresh: Callable[[], Any] | None = None
) -> None:
    # `fresh` returns the method of a new object of its class.
    for given in _parameters(function):
        function = fresh() if fresh else function
        missing = [one for one in _required_arguments(function) if one not in given]
        with Fixtures(defined) as fixtures:
            unknown = [one for one in missing if not fixtures.has(one)]
            if unknown:
                raise UnsupportedTest(f"{name} takes arguments ({', '.join(unknown)}), which are not given here")
            _run_once(name, functools.partial(function, **given, **{one: fixtures.provide(one) for one in missing}))


def _run_once(name: str, function: Callable[..., Any]) -> None:
    result = call_allowing_exit(function)
    if inspect.iscoroutine(result):
        import asyncio

        asyncio.run(result)
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise UnsupportedTest(f"{name} is a generator, which runs nothing when it is called")


def _parameters(function: Callable[..., Any]) -> list[dict[str, Any]]:
    # One dictionary of arguments per call, as pytest.mark.parametrize gives them; one empty one without it.
    calls: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            rows = [_row(row, len(names)) for row in rows]
            calls = [{**call, **dict(zip(names, row, strict=True))} for call in calls for row in rows]
    return calls


def _row(row: Any, count: int) -> Any:
    if type(row).__name__ == "ParameterSet":  # pytest.param(...)
        return row.values
    return row if count > 1 else (row,)


def _run_class(kind: type, defined: dict[str, Any]) -> None:
    # As in pytest, each test gets a new object of the class, also for each of its parameters.
    for inner in [getattr(kind, name) for name in dir(kind) if name.startswith("Test")]:
        if isinstance(inner, type):
            _run_class(inner, defined)
    prepare = getattr(kind, "setup_class", lambda: None)
    prepare(*[kind] * len(_required_arguments(prepare)))
    for name in [name for name in dir(kind) if name.startswith("test")]:
        if callable(getattr(kind, name)):
            fresh = functools.partial(_prepare_method, kind, name)
            _run_function(f"{kind.__name__}.{name}", getattr(kind, name), defined, fresh)


def _prepare_method(kind: type, name: str) -> Any:
    one = kind()
    prepare = getattr(one, "setup_method", lambda: None)
    prepare(*[getattr(one, name)] * len(_required_arguments(prepare)))
    return getattr(one, name)


def _run_unittest(cases: list[type[unittest.TestCase]]) -> None:
    for case in cases:
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            _reject_idle(case, name)
    result = unittest.TestResult()
    unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, cases)).run(result)
    if not result.wasSuccessful():
        wrong = [*result.failures, *result.errors, *((case, "it should fail") for case in result.unexpectedSuccesses)]
        case, text = wrong[0]
        raise AssertionError(f"{case}: {text.rstrip().rpartition(chr(10))[2]}")


def _reject_idle(case: type[unittest.TestCase], name: str) -> None:
    # unittest would call these without running their body, so every program would pass.
    method = getattr(case, name)
    waits = inspect.iscoroutinefunction(method) and not issubclass(case, unittest.IsolatedAsyncioTestCase)
    if waits or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise UnsupportedTest(
            f"{case.__name__}.{name} runs nothing when it is called: it is a coroutine or a generator"
        )


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.default is one.empty and one.kind not in kinds]


_Captured = namedtuple("CaptureResult", "out err")


class Fixtures:
    """The pytest fixtures that one test takes: `capsys`, `monkeypatch`, `tmp_path` and those that the tests define."""

    def __init__(self, defined: dict[str, Any]) -> None:
        self._own = {name: function for name, value in defined.items() if (function := _fixture_function(value))}
        self._made: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Fixtures:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        if name in self._own:
            return all(map(self.has, inspect.signature(self._own[name]).parameters))
        return name in _BUILTIN

    def provide(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        if name not in self._own:
            return self._stack.enter_context(_BUILTIN[name]())
        function = self._own[name]
        made = function(**{one: self.provide(one) for one in inspect.signature(function).parameters})
        if inspect.isgenerator(made):
            value = next(made)
            self._stack.callback(next, made, None)
            return value
        return made


def _fixture_function(value: Any) -> Callable[..., Any] | None:
    # The function under `@pytest.fixture`; older and newer versions of pytest wrap it differently.
    if type(value).__name__ == "FixtureFunctionDefinition":
        return value._get_wrapped_function()
    if hasattr(value, "_pytestfixturefunction"):
        return inspect.unwrap(value)
    return None


class _Capture:
    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()

    def readouterr(self) -> Any:
        texts = [stream.getvalue() for stream in (self.out, self.err)]
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        return _Captured(*texts)


@contextlib.contextmanager
def _capture() -> Iterator[_Capture]:
    capture = _Capture()
    with contextlib.redirect_stdout(capture.out), contextlib.redirect_stderr(capture.err):
        yield capture


_BUILTIN: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "capsys": _capture,
    "monkeypatch": lambda: importlib.import_module("pytest").MonkeyPatch.context(),
    "tmp_path": lambda: contextlib.nullcontext(importlib.import_module("pathlib").Path(tempfile.mkdtemp())),
}
