"""What this package does not give says so, and what to use instead: an import hook answers for modules and names."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
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


class _Loader(SourceFileLoader):
    """Gives a module its `__getattr__`; one that the module itself defines replaces it."""

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = not_given(module.__name__)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Asked first: it loads what is below `verl`, and answers for modules that have no file here."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith("verl."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None:
            raise ModuleNotFoundError(_words(fullname), name=fullname)
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


def install() -> None:
    """Have imports of missing modules, and of missing names in modules, answered in words."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _words(name: str) -> str:
    return f"posttrain-verl does not give `{name}`. {instead_of(name)}"
