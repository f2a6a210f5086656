"""A user's own tool (or agent), named by `path/to/file.py:function`, `path/to/file.py` or `module.function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.config.values import parse_yaml
from posttrain.conversations.tools.base import Tool
from posttrain.errors import UserError, first_line, working_folder
from posttrain.spelling import closest


def is_place(name: str) -> bool:
    """Whether a name is that of a file or a module, not of a registered tool."""
    return name.endswith(".py") or ".py:" in name or "." in name


def listed_in(path: str, what: str) -> Any:
    """What stands in a user's YAML file of tools or agents."""
    try:
        return parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file of {what} {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # text of another encoding among them
        raise UserError(f"the file of {what} {path} is no YAML: {error}") from None


def read_entries(path: str, what: str, key: str) -> list[Any]:
    """The list under `key` in such a file, with `${oc.env:KEY}` and the like resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree = listed_in(path, what)
    entries: Any = None
    if isinstance(tree, dict):
        try:
            entries = OmegaConf.to_container(OmegaConf.create(tree), resolve=True).get(key)  # pyright: ignore
        except OmegaConfBaseException as error:
            raise UserError(f"the file of {what} {path}: {first_line(error)}") from None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"the file of {what} {path} has no list `{key}`.")
    return entries


def called_name(name: str) -> str:
    """What a model calls the tool of this name; its settings are given under it."""
    if not is_place(name):
        return name
    source = find_tool(name)
    return getattr(source, "name", None) or getattr(source, "__name__", name)


def find_tool(name: str) -> Any:
    """The function or the subclass of Tool that the name leads to; UserError in words if there is none."""
    return find_named(name, "tool", _could_be)


def find_named(name: str, what: str, could_be: Callable[[Any], bool]) -> Any:
    """What the name leads to; `what` it is to be, in words, and which names of a file could be meant."""
    file, colon, wanted = name.rpartition(":")
    if not colon and name.endswith(".py"):
        file, wanted = name, ""
    if file.endswith(".py"):
        return _chosen(_module_of(Path(file), what), wanted, name, what, could_be)
    module_name, _, wanted = name.rpartition(".")
    return _chosen(_import(module_name, name, what), wanted, name, what, could_be)


def _module_of(path: Path, what: str) -> types.ModuleType:
    if not path.is_file():
        near = closest(path.name, [one.name for one in path.parent.glob("*.py")])
        hint = f"; did you mean {near}?" if near else ""
        article = "an" if what == "agent" else "a"
        raise UserError(
            f"the file {path} of {article} {what} does not exist{hint}\n  to do:  give its path from {working_folder()}"
        )
    path = path.resolve()
    name = "tool_file_" + "_".join(path.with_suffix("").parts[1:])
    if name in sys.modules:  # two tools of one file share it
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:  # neighbours can be imported, as when the file is run as a script
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_failed(f"{what} {path}", error) from error
    return module


def _import(module: str, name: str, what: str) -> types.ModuleType:
    folder = str(working_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module + ".").startswith(error.name + "."):
            if not str(error).startswith("No module named"):  # a package that says itself what it does not have
                raise UserError(f"the {what} {name} cannot be had: {error}") from None
            raise UserError(
                f"there is no module {error.name} for the {what} {name}, neither in {folder} nor installed.\n"
                "  to do:  give module.function as seen from the working folder, or path/to/file.py:function"
            ) from None
        raise _import_failed(f"{what} {name}", error) from error
    except BaseException as error:
        raise _import_failed(f"{what} {name}", error) from error


def _import_failed(what: str, error: BaseException) -> UserError:
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, SyntaxError):
        return UserError(f"syntax error in {error.filename}, line {error.lineno}: {error.msg}")
    return UserError(f"importing the {what} failed: {type(error).__name__}: {first_line(error)}")


def _chosen(module: types.ModuleType, wanted: str, name: str, what: str, could_be: Callable[[Any], bool]) -> Any:
    found = getattr(module, wanted, None) if wanted else None
    if callable(found):
        return found
    public = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "") == module.__name__ and could_be(value)
    ]
    if not wanted and len(public) == 1:
        return getattr(module, public[0])
    near = closest(wanted, public) if wanted else None
    hint = f"; did you mean {near}?" if near else ""
    unclear = f"could mean several {what}s" if public else "has no function"
    lacks = f"has no function {wanted!r}{hint}" if wanted else unclear
    raise UserError(
        f"{module.__file__} {lacks}\n  set in: the {what} {name}\n  to do:  use one of: {', '.join(public)}"
    )


def _could_be(value: Any) -> bool:
    return inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, Tool))
