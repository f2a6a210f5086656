"""Runs what test code has defined: check(candidate), test functions, test classes, with the fixtures that they take.

A test that cannot be run is a failure. If it were skipped, every program would pass it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import tempfile
import unittest
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.sandbox.link import ProgramExit
from posttrain.sandbox.names import loaded_names
from posttrain.sandbox.stand_ins import is_stand_in

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
    for name, value in defined.items():
        if is_stand_in(value):
            continue  # it belongs to the program, even if its name begins with `test`
        if (
            inspect.isfunction(value)
            and name.startswith("test")
            and (name not in used or not _required_arguments(value))
        ):
            _run_function(name, value, defined)
        elif isinstance(value, type) and not issubclass(value, unittest.TestCase) and name.startswith("Test"):
            _run_class(value, defined)
    _run_unittest([one for one in defined.values() if isinstance(one, type) and issubclass(one, unittest.TestCase)])


def call_allowing_exit(function: Callable[..., Any], *args: Any) -> Any:
    # `sys.exit()` of the tests themselves is no failure unless its code says so. That of the program is a ProgramExit.
    try:
        return function(*args)
    except ProgramExit:
        raise
    except SystemExit as error:
        if error.code not in (None, 0, False):
            raise AssertionError(f"the tests ended with {error.code}") from None


def _run_function(name: str, function: Callable[..., Any], defined: dict[str, Any]) -> None:
    for given in _parameters(function):
        missing = [one for one in _required_arguments(function) if one not in given]
        with Fixtures(defined) as fixtures:
            unknown = [one for one in missing if not fixtures.has(one)]
            if unknown:
                raise UnsupportedTest(f"{name} takes arguments ({', '.join(unknown)}), which nobody gives here")
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
    # As in pytest, each test gets a new object of the class.
    for inner in [getattr(kind, name) for name in dir(kind) if name.startswith("Test")]:
        if isinstance(inner, type):
            _run_class(inner, defined)
    for name in [name for name in dir(kind) if name.startswith("test")]:
        one = kind()
        prepare = getattr(one, "setup_method", lambda: None)
        prepare(*[getattr(one, name)] * len(_required_arguments(prepare)))
        if callable(getattr(one, name)):
            _run_function(f"{kind.__name__}.{name}", getattr(one, name), defined)


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


@contextlib.contextmanager
def _monkeypatch() -> Iterator[Any]:
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        yield patch


@contextlib.contextmanager
def _folder() -> Iterator[Any]:
    from pathlib import Path

    yield Path(tempfile.mkdtemp())


_BUILTIN: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "capsys": _capture,
    "monkeypatch": _monkeypatch,
    "tmp_path": _folder,
}
