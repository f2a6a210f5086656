"""Classes and functions by file or dotted name."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from posttrain.external import import_external
from verl._missing import not_given

__getattr__ = not_given(__name__)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def is_vllm_available() -> bool:
    """Whether vLLM is installed; nothing is imported to find out."""
    return _is_installed("vllm")


def is_sglang_available() -> bool:
    return _is_installed("sglang")


def is_megatron_core_available() -> bool:
    return _is_installed("megatron")


def is_trl_available() -> bool:
    return _is_installed("trl")


def load_module(module_path: str, module_name: str | None = None) -> Any:
    """A module from a file, or `pkg://dotted.name`."""
    return import_external(module_path.removeprefix("pkg://").removeprefix("file://"), "module_path")


def load_extern_object(module_path: str, object_name: str) -> Any:
    """Something of a module by its name."""
    module = load_module(module_path)
    if not hasattr(module, object_name):
        raise AttributeError(f"{module_path} has no `{object_name}`")
    return getattr(module, object_name)


load_extern_type = load_extern_object


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """`package.module.Class`."""
    module, _, name = fqn.rpartition(".")
    if not module:
        raise ValueError(f"{description}: `{fqn}` is not of the form package.module.Class")
    return getattr(importlib.import_module(module), name)


def import_external_libs(external_libs: Any = None) -> None:
    """Imports modules for what they register."""
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        importlib.import_module(name)


def deprecated(replacement: str = "") -> Callable[[Any], Any]:
    """Decorator: a warning when a function is called."""

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            return function

        @functools.wraps(function)
        def warned(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(f"{function.__qualname__} is deprecated. {replacement}", FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warned

    return decorate
