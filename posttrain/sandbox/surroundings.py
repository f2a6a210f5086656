"""Makes what tests patch in their own process (streams, `input`, `print`, modules) take effect in the program's.

Tests use `redirect_stdout`, `patch("builtins.input")` or `sys.stdin = StringIO(...)`. The replacements are sent to the
program before it runs, and what it prints is written to where the tests look. This module also changes libraries in the
process that judges: to look at objects where they live, and to compare strictly.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from posttrain.sandbox.names import list_nodes
from posttrain.sandbox.objects import MODULE
from posttrain.sandbox.stand_ins import is_stand_in

if TYPE_CHECKING:
    from posttrain.sandbox.peer import Peer
    from posttrain.sandbox.supervise import Program

# What tests replace by assignment. What they replace with unittest.mock is forwarded by forward_patches.
_PLACES: tuple[tuple[Any, str], ...] = (
    (sys, "stdin"),
    (sys, "argv"),
    (builtins, "input"),
    (builtins, "print"),
    (builtins, "open"),
)


def _variables() -> dict[bytes, bytes]:
    environ: Any = os.environ
    return environ._data  # comparing `os.environ` itself decodes every variable


class Surroundings:
    """What the tests have replaced, as last sent to the program."""

    def __init__(self, peer: Peer, program: Program) -> None:
        self._peer, self._program = peer, program
        self._last_sent = [getattr(owner, name) for owner, name in _PLACES]
        self._first = list(self._last_sent)
        self._environment = dict(_variables())
        self._streams = self._now = (sys.stdout, sys.stderr)
        self._busy = False

    def before(self) -> None:
        """Send what the tests have replaced; called before every request."""
        if self._busy:
            return
        self._busy = True
        try:
            self._send_changes()
        finally:
            self._busy = False

    def _send_changes(self) -> None:
        for place, (owner, name) in enumerate(_PLACES):
            now = getattr(owner, name)
            if now is not self._last_sent[place]:
                self._last_sent[place] = now
                self.replace(owner.__name__, name, now, now is self._first[place])
        if (variables := _variables()) != self._environment:
            self._environment = dict(variables)
            self._peer.ask("environment", None, (dict(os.environ),))
        if (sys.stdout, sys.stderr) != self._now:
            self._program.read_new_output()  # earlier output does not belong to the new streams
            self._now = (sys.stdout, sys.stderr)

    def after(self) -> None:
        """Write what the program printed to where the tests look; called after every message from it."""
        if self._now == self._streams:
            return
        for text, stream, first in zip(self._program.read_new_output(), self._now, self._streams, strict=True):
            if text and stream is not first:
                with contextlib.suppress(Exception):
                    stream.write(text)

    def replace(self, module: str, name: str, value: Any, back: bool) -> None:
        """Replace something in the program's process by an object of the tests, or restore it."""
        self._peer.ask("replace", None, (module, name, back, None if back else value))


def warn(category: Any, text: str) -> None:
    """Repeat a warning of the program here, for tests that expect one."""
    if not (isinstance(category, type) and issubclass(category, Warning)):
        category = UserWarning
    warnings.warn_explicit(str(text), category, "program.py", 1, registry={})


def log(name: str, level: int, text: str) -> None:
    """Repeat a log message of the program here, for tests that expect one."""
    logger = logging.getLogger(str(name))
    if logger.isEnabledFor(int(level)):
        logger.handle(logger.makeRecord(logger.name, int(level), "program.py", 1, str(text), (), None))


def forward_patches(mock: Any, surroundings: Surroundings) -> None:
    """Let unittest.mock also patch the modules in the program's process."""
    patch: Any = mock._patch
    if hasattr(patch, "_forwards"):
        return
    enter, leave = patch.__enter__, patch.__exit__

    def enter_and_send(self: Any) -> Any:
        value = enter(self)
        _send_changes(self, False)
        return value

    def send_and_leave(self: Any, *error: Any) -> Any:
        try:
            _send_changes(self, True)
        finally:
            left = leave(self, *error)
        return left

    def _send_changes(self: Any, back: bool) -> None:
        module = str(getattr(self.target, "__name__", ""))
        if module == MODULE or sys.modules.get(module) is not self.target or (module, self.attribute) in _WATCHED:
            return
        module = MODULE if module == "__main__" else module
        surroundings.replace(module, self.attribute, getattr(self.target, self.attribute, None), back)

    patch.__enter__, patch.__exit__, patch._forwards = enter_and_send, send_and_leave, True


_WATCHED = {(owner.__name__, name) for owner, name in _PLACES} | {("sys", "stdout"), ("sys", "stderr")}
# Functions that inspect their argument, which only works in the process where it lives.
_LIBRARY = {
    "dataclasses": ("asdict", "astuple", "fields", "is_dataclass", "replace"),
    "inspect": ("getdoc", "getsource", "isabstract", "signature"),
    "typing": ("get_type_hints",),
}
# The others return plain data, so the program cannot have an object of its own answer for their result.
_RETURN_OBJECTS = {"replace", "signature"}


def forward_library_calls(tree: ast.AST, peer: Peer) -> None:
    """Call these library functions where their argument lives."""
    for module in imported_packages(tree) & _LIBRARY.keys():
        library = importlib.import_module(module)
        for name in _LIBRARY[module]:
            function = getattr(library, name)
            if not hasattr(function, "_asks"):
                setattr(library, name, _forwarding(peer, module, name, function))


def _forwarding(peer: Peer, module: str, name: str, function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and is_stand_in(args[0]):
            value = peer.ask("call", [module, name], args, options)
            if is_stand_in(value) and name not in _RETURN_OBJECTS:
                raise TypeError(f"{module}.{name} of the program's process returned a {type(value).__name__}")
            return value
        return function(*args, **options)

    wrapper.__dict__["_asks"] = True
    return wrapper


def forward_seeds(peer: Peer, with_numpy: bool) -> None:
    """Let `random.seed` of the tests seed the program's generator too: in plain Python both have the same one."""
    for module in ("random", "numpy.random")[: 1 + with_numpy]:
        with contextlib.suppress(ImportError):
            library = importlib.import_module(module)
            if not hasattr(library.seed, "_asks"):
                library.seed = _seeding(peer, module, library.seed)  # pyright: ignore


def _seeding(peer: Peer, module: str, seed: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> None:
        seed(*args, **options)
        peer.ask("call", [module, "seed"], args, options)

    wrapper.__dict__["_asks"] = True
    return wrapper


_TRUTHS = ("allclose", "array_equiv", "isclose")
_ASSERTIONS = (
    "assert_allclose", "assert_almost_equal", "assert_array_almost_equal", "assert_array_almost_equal_nulp",
    "assert_array_equal", "assert_array_less", "assert_array_max_ulp", "assert_equal",
)  # fmt: skip
_done: set[str] = set()


def make_strict(tree: ast.AST, modules: set[str]) -> None:
    """Make comparisons of numpy and pytest strict, if the test code imports them or uses them as `modules`.

    `numpy.allclose([], 4.2)` is True, and so is `numpy.array([]) == pytest.approx(4.2)`: a program that returns an
    empty list would pass every test of a number written that way.
    """
    for name, prepare in (("numpy", _prepare_numpy), ("pytest", _prepare_pytest)):
        if name in imported_packages(tree) | modules and name not in _done:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue  # the tests report it themselves
            prepare(module)
            _done.add(name)


def imported_packages(tree: ast.AST) -> set[str]:
    found = {alias.name for node in list_nodes(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in list_nodes(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in found}


def _prepare_numpy(numpy: Any) -> None:
    testing = importlib.import_module("numpy.testing")
    for name in _TRUTHS:
        setattr(numpy, name, _compare_strictly(getattr(numpy, name), lambda: numpy.False_))
    for name in _ASSERTIONS:
        if hasattr(testing, name):
            setattr(testing, name, _compare_strictly(getattr(testing, name), _fail))


def _prepare_pytest(pytest: Any) -> None:
    pytest.main = lambda *_, **__: 0  # the judge runs the tests; main would search for them elsewhere
    kind: Any = type(pytest.approx(1.0))
    close = kind.__eq__
    kind.__eq__ = lambda self, actual: not _is_empty(actual) and close(self, actual)


def _compare_strictly(compare: Callable[..., Any], different: Callable[[], Any]) -> Callable[..., Any]:
    # A value without members differs from one with members.
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
