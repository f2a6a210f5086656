"""What this package does not give says so, and what to use instead: modules by an import hook, names by `not_given`."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from verl._instead import instead_of

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def not_given(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: an error that says what to use instead of a name which is not here."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python's own questions
        words = _words(f"{module}.{name}")
        # `from module import name` throws an AttributeError's words away; everything else expects one.
        raise ImportError(words, name=module) if _is_import(sys._getframe(1)) else AttributeError(words)

    return missing


def _is_import(frame: Any) -> bool:
    while frame is not None and frame.f_globals.get("__name__", "").startswith("verl"):
        if frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


class _Finder(MetaPathFinder):
    """Asked last: whatever is below `verl` and was not found has no file here."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.startswith("verl."):
            raise ModuleNotFoundError(_words(fullname), name=fullname)


def install() -> None:
    """Have imports of missing modules answered in words."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _words(name: str) -> str:
    return f"posttrain-verl does not give `{name}`. {instead_of(name)}"
