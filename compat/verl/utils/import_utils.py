"""Classes and functions by file or dotted name."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from posttrain.external import import_external


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


def load_module(module_path: str | None, module_name: str | None = None) -> Any:
    """A module from a file, or `pkg://dotted.name`; under `module_name`, if given, it can be imported afterwards."""
    if not module_path:
        return None
    path = module_path.removeprefix("pkg://").removeprefix("file://")
    if path.endswith(".py") and not os.path.exists(path):
        raise FileNotFoundError(f"Custom module file not found: {path}")
    if module_name in sys.modules:
        raise RuntimeError(f"{path} cannot be loaded as {module_name}: a module of this name already exists")
    try:
        return import_external(path, "module_path") if module_name is None else _load_as(module_name, path)
    except Exception as error:
        raise RuntimeError(f"Error loading module from {path}: {error}") from error


def _load_as(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_extern_object(module_path: str | None, object_name: str) -> Any:
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
