"""In a worker: the reward of the user, a function of a file or behind a dotted path.

Of a file with several functions one is chosen.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.rewards.signatures import FORMS, explain_import_failure, form_of
from posttrain.rewards.types import RewardError, RewardSpec


def import_file(path: Path) -> types.ModuleType:
    """Import the user's file as a module."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RewardError(
            f"reward file {path} does not exist{hint}",
            todo="give the path of a Python file, relative to the working folder",
        )
    # The file can import its neighbours, as when it is run as a script.
    sys.path.insert(0, str(path.parent))
    module_spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    loader = module_spec.loader if module_spec is not None else None
    if module_spec is None or loader is None:
        raise RewardError(f"reward file {path} is no Python file", todo="give a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module
    _run_import(lambda: loader.exec_module(module), str(path))
    return module


def find_dotted(spec: RewardSpec) -> Callable[..., Any]:
    """Find the function of a dotted path, which ends at a function or at a module."""
    sys.path.insert(0, spec.folder)
    parts = spec.path.split(".")
    _prefer_folder(Path(spec.folder), parts)
    for length in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:length]), parts[length:]
        module = _run_import(lambda name=name: importlib.import_module(name), spec.path, absent_ok=name)
        if module is None:
            continue
        if not rest:
            return choose_function(module, spec.name, module_name=parts[-1])
        if spec.name and spec.name != rest[-1]:
            raise RewardError(
                f"custom_reward_function.path={spec.path} names {rest[-1]}, but .name is {spec.name}",
                todo="leave one of them out",
            )
        target: Any = module
        for attribute in rest:
            target = getattr(target, attribute, None)
        if callable(target):
            return instantiate(target)
        raise _no_such_function(module, rest[-1])
    hint = "; names under `verl.` need the package posttrain-verl" if parts[0] == "verl" else ""
    raise RewardError(
        f"no module {parts[0]!r} for the reward {spec.path} in {spec.folder} or among the installed packages{hint}",
        todo="give module.function as seen from the working folder, or the path of a Python file",
    )


def _prefer_folder(folder: Path, parts: list[str]) -> None:
    # A folder without __init__.py that holds the module takes precedence over an installed package of the same name.
    first = folder / parts[0]
    if not first.is_dir() or (first / "__init__.py").exists() or parts[0] in sys.modules:
        return
    if any(folder.joinpath(*parts[:n]).with_suffix(".py").is_file() for n in range(2, len(parts) + 1)):
        package = types.ModuleType(parts[0])
        package.__path__ = [str(first)]
        sys.modules[parts[0]] = package


def _run_import(action: Callable[[], Any], what: str, absent_ok: str | None = None) -> Any:
    try:
        return action()
    except ModuleNotFoundError as error:
        # `a.b.c` may be a function: then the module a.b.c (or, one level up, the "package" a.b) is what was not found.
        if absent_ok is not None and error.name and (absent_ok + ".").startswith(error.name + "."):
            return None
        raise explain_import_failure(error, what) from error
    except BaseException as error:
        raise explain_import_failure(error, what) from error


def choose_function(module: types.ModuleType, name: str | None, module_name: str | None = None) -> Callable[..., Any]:
    """Return the named function, the one named like the module (dotted paths), `compute_score`, or the only one."""
    if name is not None:
        if callable(getattr(module, name, None)):
            return instantiate(getattr(module, name))
        raise _no_such_function(module, name)
    for usual in (module_name, "compute_score"):
        if usual and callable(getattr(module, usual, None)):
            return instantiate(getattr(module, usual))
    public = _public_functions(module)
    fitting = [function for function in public.values() if form_of(function)]
    if len(fitting) == 1:
        return fitting[0]
    if len(public) == 1:
        return next(iter(public.values()))  # its signature is rejected with its own message
    if not public:
        raise RewardError(
            f"{module.__file__} defines no public function",
            todo="define compute_score(data_source, solution_str, ground_truth, extra_info=None)",
        )
    candidates = ", ".join(f"{name}{_signature(function)}" for name, function in public.items())
    raise RewardError(
        f"{module.__file__} has no compute_score, and {len(fitting) or 'none'} of its functions could be the reward: "
        + candidates,
        todo="set custom_reward_function.name to the one to use, or sum several by reward.functions"
        if fitting
        else f"name its parameters {FORMS}",
    )


def _public_functions(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_own_function(value, module)
    }


def _is_own_function(value: Any, module: types.ModuleType) -> bool:
    # A function of this file, a partial one, or a callable object of a class of this file.
    if inspect.isclass(value) or not callable(value):
        return False
    return isinstance(value, partial) or getattr(value, "__module__", None) == module.__name__


def _signature(function: Callable[..., Any]) -> str:
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(unknown)"


def instantiate(function: Any) -> Any:
    """Return the reward itself; for a class with callable objects, one object."""
    if not inspect.isclass(function) or "__call__" not in dir(function):
        return function
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise RewardError(
            f"the reward {function.__name__} is a class that is made with arguments: {_signature(function)}",
            todo=f"name an object of it, such as my_reward = {function.__name__}(...), or give defaults",
        ) from None
    return function()


def _no_such_function(module: types.ModuleType, name: str) -> RewardError:
    public = list(_public_functions(module))
    near = difflib.get_close_matches(name, public, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return RewardError(
        f"{module.__file__} has no function {name!r}{hint}",
        todo=f"use one of: {', '.join(public) or '(it defines none)'}",
    )
