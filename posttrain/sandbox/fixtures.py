"""What pytest gives to the arguments of a test: `capsys`, `monkeypatch`, `tmp_path`, and fixtures of the tests."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

_Captured = namedtuple("CaptureResult", "out err")


class Fixtures:
    """Fixtures of one test; what they set up is undone at its end."""

    def __init__(self, defined: dict[str, Any]) -> None:
        self._own = {name: function for name, value in defined.items() if (function := _fixture_function(value))}
        self._made: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Fixtures:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def knows(self, name: str) -> bool:
        if name in self._own:
            return all(map(self.knows, inspect.signature(self._own[name]).parameters))
        return name in _BUILTIN

    def give(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        if name not in self._own:
            return self._stack.enter_context(_BUILTIN[name]())
        function = self._own[name]
        made = function(**{one: self.give(one) for one in inspect.signature(function).parameters})
        if inspect.isgenerator(made):
            value = next(made)
            self._stack.callback(next, made, None)
            return value
        return made


def _fixture_function(value: Any) -> Callable[..., Any] | None:
    """The function under `@pytest.fixture`, whichever version of pytest wrapped it."""
    if type(value).__name__ == "FixtureFunctionDefinition":
        return value._get_wrapped_function()
    if hasattr(value, "_pytestfixturefunction"):
        return inspect.unwrap(value)
    return None


class _Capture:
    def __init__(self, out: io.StringIO, err: io.StringIO) -> None:
        self._streams = out, err

    def readouterr(self) -> Any:
        texts = [stream.getvalue() for stream in self._streams]
        for stream in self._streams:
            stream.seek(0)
            stream.truncate()
        return _Captured(*texts)


@contextlib.contextmanager
def _capture() -> Iterator[_Capture]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams = io.StringIO(), io.StringIO()
    try:
        yield _Capture(*streams)
    finally:
        sys.stdout, sys.stderr = before


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
