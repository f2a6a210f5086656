"""What surrounds a program besides its arguments: standard streams, `input`, `print`, and what tests patch.

Tests replace these in their own process (`redirect_stdout`, `patch("builtins.input")`, `sys.stdin = StringIO(...)`).
The program lives in another one, so it is told before it runs, and what it prints is written to where the tests look.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from posttrain.sandbox.objects import MODULE
from posttrain.sandbox.stand_ins import is_stand_in
from posttrain.sandbox.strict import imported_packages

if TYPE_CHECKING:
    from posttrain.sandbox.peer import Peer
    from posttrain.sandbox.supervise import Program

_PLACES: tuple[tuple[Any, str], ...] = (
    (sys, "stdin"),
    (sys, "argv"),
    (builtins, "input"),
    (builtins, "print"),
    (builtins, "open"),
)
"""What tests replace by assignment; what they replace by unittest.mock is told by it."""


class Surroundings:
    """Those of the tests, as the program was last told of them."""

    def __init__(self, peer: Peer, program: Program) -> None:
        self._peer, self._program = peer, program
        self._told = [getattr(owner, name) for owner, name in _PLACES]
        self._first = list(self._told)
        self._environment = dict(os.environ._data)  # pyright: ignore
        self._streams = self._now = (sys.stdout, sys.stderr)
        self._busy = False

    def before(self) -> None:
        """Called before every request."""
        if self._busy:
            return
        self._busy = True
        try:
            self._tell()
        finally:
            self._busy = False

    def _tell(self) -> None:
        for place, (owner, name) in enumerate(_PLACES):
            now = getattr(owner, name)
            if now is not self._told[place]:
                self._told[place] = now
                self.replace(owner.__name__, name, now, now is self._first[place])
        if os.environ._data != self._environment:  # pyright: ignore  # its own comparison decodes every variable
            self._environment = dict(os.environ._data)  # pyright: ignore
            self._peer.ask("environment", None, (dict(os.environ),))
        if (sys.stdout, sys.stderr) != self._now:
            self._program.take_written()  # what was printed before is not for the new ones
            self._now = (sys.stdout, sys.stderr)

    def after(self) -> None:
        """Called when the program has answered, or asks something: what it printed goes to where the tests look."""
        if self._now == self._streams:
            return
        for text, stream, first in zip(self._program.take_written(), self._now, self._streams, strict=True):
            if text and stream is not first:
                with contextlib.suppress(Exception):
                    stream.write(text)

    def replace(self, module: str, name: str, value: Any, back: bool) -> None:
        """Let the program have something of ours in place of its own, or its own again."""
        self._peer.ask("replace", None, (module, name, back, None if back else value))


def warn(category: Any, text: str) -> None:
    """A warning of the program's, for tests that expect one."""
    if not (isinstance(category, type) and issubclass(category, Warning)):
        category = UserWarning
    warnings.warn_explicit(str(text), category, "program.py", 1, registry={})


def log(name: str, level: int, text: str) -> None:
    """A message that the program logs, for tests that expect one."""
    logger = logging.getLogger(str(name))
    if logger.isEnabledFor(int(level)):
        logger.handle(logger.makeRecord(logger.name, int(level), "program.py", 1, str(text), (), None))


def tell_of_patches(mock: Any, around: Surroundings) -> None:
    """Let unittest.mock replace things in the program's modules as well."""
    patch: Any = mock._patch
    if hasattr(patch, "_told"):
        return
    enter, leave = patch.__enter__, patch.__exit__

    def told_enter(self: Any) -> Any:
        value = enter(self)
        _tell(self, False)
        return value

    def told_leave(self: Any, *error: Any) -> Any:
        try:
            _tell(self, True)
        finally:
            left = leave(self, *error)
        return left

    def _tell(self: Any, back: bool) -> None:
        module = str(getattr(self.target, "__name__", ""))
        if module == MODULE or sys.modules.get(module) is not self.target or (module, self.attribute) in _WATCHED:
            return
        module = MODULE if module == "__main__" else module
        around.replace(module, self.attribute, getattr(self.target, self.attribute, None), back)

    patch.__enter__, patch.__exit__, patch._told = told_enter, told_leave, True


_WATCHED = {(owner.__name__, name) for owner, name in _PLACES} | {("sys", "stdout"), ("sys", "stderr")}
_LIBRARY = {
    "dataclasses": ("asdict", "astuple", "fields", "is_dataclass", "replace"),
    "inspect": ("getdoc", "getsource", "isabstract", "signature"),
    "typing": ("get_type_hints",),
}
"""Functions that look into their argument; those of the process in which it lives can."""


def ask_of_library(tree: ast.AST, peer: Peer) -> None:
    """Let functions of the library that the tests use be called where the object lives."""
    for module in imported_packages(tree) & _LIBRARY.keys():
        library = importlib.import_module(module)
        for name in _LIBRARY[module]:
            function = getattr(library, name)
            if not hasattr(function, "_asks"):
                setattr(library, name, _where_it_lives(peer, module, name, function))


def _where_it_lives(peer: Peer, module: str, name: str, function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and is_stand_in(args[0]):
            return peer.ask("call", [module, name], args, options)
        return function(*args, **options)

    wrapper.__dict__["_asks"] = True
    return wrapper
