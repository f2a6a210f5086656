"""Comparisons of numpy and pytest as tests mean them: nothing at all is not close to a number.

`numpy.allclose([], 4.2)` is true, and so is `numpy.array([]) == pytest.approx(4.2)`: a program that gives an empty list
would pass every test of a number that is written so. Used in the process that judges, before the tests import them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from posttrain.sandbox.names import nodes_of

_TRUTHS = ("allclose", "array_equiv", "isclose")
_ASSERTIONS = (
    "assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "assert_array_almost_equal_nulp",
    "assert_array_equal", "assert_array_less", "assert_array_max_ulp", "assert_equal",
)  # fmt: skip
_done: set[str] = set()


def make_strict(tree: ast.AST, modules: set[str]) -> None:
    """Prepare those of the two packages that the test code imports, or uses under the names of `modules`."""
    for name, prepare in (("numpy", _prepare_numpy), ("pytest", _prepare_pytest)):
        if name in imported_packages(tree) | modules and name not in _done:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue  # the tests will say so
            prepare(module)
            _done.add(name)


def imported_packages(tree: ast.AST) -> set[str]:
    """The packages that are imported anywhere in the code."""
    found = {alias.name for node in nodes_of(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in nodes_of(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in found}


def _prepare_numpy(numpy: Any) -> None:
    testing = importlib.import_module("numpy.testing")
    for name in _TRUTHS:
        setattr(numpy, name, _told_apart(getattr(numpy, name), lambda: numpy.False_))
    for name in _ASSERTIONS:
        if hasattr(testing, name):
            setattr(testing, name, _told_apart(getattr(testing, name), _fail))


def _prepare_pytest(pytest: Any) -> None:
    pytest.main = lambda *_, **__: 0  # the judge runs the tests; it would look for them elsewhere
    kind: Any = type(pytest.approx(1.0))
    close = kind.__eq__
    kind.__eq__ = lambda self, actual: not _is_empty(actual) and close(self, actual)


def _told_apart(compare: Callable[..., Any], different: Callable[[], Any]) -> Callable[..., Any]:
    """The comparison of two values, for which one without members differs from one with some."""
    signature = inspect.signature(compare)

    @functools.wraps(compare)
    def compared(*args: Any, **options: Any) -> Any:
        first, second = list(signature.bind(*args, **options).arguments.values())[:2]
        if _is_empty(first) != _is_empty(second):
            return different()
        return compare(*args, **options)

    return compared


def _is_empty(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    try:
        return numpy is not None and numpy.size(value) == 0
    except (TypeError, ValueError):  # rows of different lengths
        return False


def _fail() -> None:
    raise AssertionError("one of the two has no members")
