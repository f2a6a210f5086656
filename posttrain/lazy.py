"""Imports at first use: `torch` and `numpy` as names, the names of a package, and packages that plug into a lower one.

    from posttrain.lazy import torch
    __getattr__ = lazy_names(__name__, rows="load_rows resolve_files")

Files that declare settings (algorithms) are imported to check a configuration, which must not take the seconds that
`import torch` does. Nothing at the level of such a module may touch an attribute: no `@torch.no_grad()`, no default
such as `dtype=torch.float32`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch
    import torch.nn.functional as functional
else:

    class LazyModule(ModuleType):
        """Stands for a module, and imports it when an attribute is first read."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)  # the next time this function is not called
            return value

    torch, functional, numpy = LazyModule("torch"), LazyModule("torch.nn.functional"), LazyModule("numpy")

__all__ = ["functional", "lazy_names", "numpy", "torch"]

# Packages that plug into a lower one by name: `posttrain/__init__.py` sets them, `config/checked.py` imports them.
# The package with `dialect(program)`, what other systems call the settings.
dialect_package: str | None = None
# Modules with checks of settings that only their package understands.
check_modules: tuple[str, ...] = ()


def lazy_names(package: str, **names_by_module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose modules are imported when one of their names is first asked for."""
    homes = {name: module for module, names in names_by_module.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return find
