"""`torch` and `numpy` as names that import the package when they are first used.

    from posttrain.lazy import torch

Files that declare settings (algorithms) are imported to check a configuration, which must not take the seconds that
`import torch` does. Nothing at the level of such a module may touch an attribute: no `@torch.no_grad()`, no default
such as `dtype=torch.float32`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch
    import torch.nn.functional as functional
else:

    class LazyModule(ModuleType):
        """Stands for a module; the first attribute that is asked for imports it."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)  # the next time this function is not called
            return value

    torch, functional, numpy = LazyModule("torch"), LazyModule("torch.nn.functional"), LazyModule("numpy")

__all__ = ["functional", "numpy", "torch"]
