"""Things by name: one registry for estimators, losses, scorers, samplers, tools, agents, loggers and engines.

    SAMPLERS: Registry[Order] = Registry("sampler")

    @SAMPLERS.register("mine")
    def mine(dataset, config, seed, epoch): ...

    SAMPLERS.find("mien")   # UserError: Unknown sampler `mien`. Did you mean `mine`? Known: curriculum, default, mine.

A registry is a mutable mapping: tests and scripts may also write `SAMPLERS["mine"] = mine`.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from posttrain.errors import UserError

T = TypeVar("T")
F = TypeVar("F")
# Those of the modules that are imported so far, by their kind.
REGISTRIES: dict[str, Registry[Any]] = {}
_ROOT = Path(__file__).parent


class RegistryError(UserError, ValueError):
    """A name that is unknown or taken."""


class Registry(MutableMapping[str, T]):
    """Entries of one kind by name.

    kind: what an entry is, for messages: "policy loss".
    package: a package with one built-in entry per file, such as `posttrain.algorithms.losses`. Its files are imported
        when the registry is first read, in alphabetical order: a new file needs no line elsewhere.
    error: the exception for an unknown or taken name.
    hint: a sentence that ends the message about an unknown name.
    """

    def __init__(self, kind: str, *, package: str = "", error: type[Exception] = RegistryError, hint: str = "") -> None:
        self.kind, self.package, self.error, self.hint = kind, package, error, hint
        REGISTRIES[kind] = self
        self._entries: dict[str, T] = {}
        self._is_loaded = not package

    def register(self, name: str | Enum) -> Callable[[F], F]:
        """Decorator: stores what it decorates under `name`, and gives it back unchanged."""
        self.check_name(name)

        def decorate(entry: F) -> F:
            self.add(name, cast(Any, entry))  # the decorated thing keeps its own type
            return entry

        return decorate

    def check_name(self, name: object) -> None:
        """A decorator without a name was given the function itself."""
        if callable(name):
            raise self.error(f'The decorator for a new {self.kind} needs a name in quotes, as in @...("my_name").')

    def add(self, name: str | Enum, entry: T) -> None:
        """Store an entry. A name taken by another entry is an error; the same definition may run twice."""
        key = name_of(name)
        taken = self._entries.get(key)
        if taken is not None and not is_same_definition(taken, entry):
            raise self.error(
                f"The {self.kind} `{key}` is already registered by {_origin(taken)}, so {_origin(entry)} cannot take "
                "that name. Register it under another one."
            )
        self._entries[key] = entry

    def find(self, name: str | Enum) -> T:
        """The entry of this name; otherwise an error that lists the known names and the nearest one."""
        entry = self.get(name_of(name))
        if entry is None:
            raise self.error(unknown_name(self.kind, name_of(name), self, self.hint))
        return entry

    def _load(self) -> dict[str, T]:
        if not self._is_loaded:
            self._is_loaded = True  # first: the files may read the registry while they are imported
            for module in _modules_of(self.package):
                importlib.import_module(module)
            # A file that was imported by itself before has registered first: the order must not depend on that.
            own = [name for name in self._entries if not _module(self._entries[name]).startswith(self.package)]
            built_in = sorted(self._entries.keys() - set(own))
            self._entries = {name: self._entries[name] for name in (*built_in, *own)}
        return self._entries

    def __getitem__(self, name: str) -> T:
        return self._load()[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._load()[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._load()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return len(self._load())


def registered_by(kind: str, modules: Callable[[str], bool]) -> tuple[str, ...]:
    """Names of one kind that modules for which `modules` is true have registered in this process."""
    registry = REGISTRIES.get(kind, {})
    return tuple(name for name, entry in registry.items() if modules(_module(entry)))


def name_of(name: str | Enum) -> str:
    """The plain name behind a name or an enum member."""
    return str(name.value if isinstance(name, Enum) else name)


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """The known name that was probably meant. None is better than a wrong one: `gspo` is not `grpo`, but `grop` is."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.81)  # above 0.8, which `dapo` and `codapo` have
    return next(iter(near or [known for known in names if sorted(known) == sorted(str(name))]), None)


def unknown_name(kind: str, name: object, known: Iterable[str], hint: str = "") -> str:
    """The message for a name that does not exist: the nearest one, and all of them."""
    names = sorted(known)
    near = nearest_name(name, names)
    guess = f" Did you mean `{near}`?" if near else ""
    return f"Unknown {kind} `{name}`.{guess} Known: {', '.join(names)}.{' ' + hint if hint else ''}"


@cache
def built_in_names(file: str, decorator: str) -> tuple[str, ...]:
    """Names that a file of posttrain registers, as in `@decorator("NAME")`, in their order.

    They are read from its source, so that configuration can check a name without importing torch.
    """
    source = (_ROOT / file).read_text(encoding="utf-8")
    return tuple(re.findall(rf'^@?{re.escape(decorator)}\("([^"]+)"', source, re.MULTILINE))


def _modules_of(package: str) -> list[str]:
    files = sorted(_ROOT.joinpath(*package.split(".")[1:]).glob("*.py"))
    return [f"{package}.{file.stem}" for file in files if file.stem != "__init__"]


def is_same_definition(old: Any, new: Any) -> bool:
    """The same definition run again: a notebook cell, or one file imported under two names."""
    if old is new:
        return True
    old, new = _function_of(old), _function_of(new)
    name_old, name_new = (getattr(f, "__qualname__", repr(f)) for f in (old, new))
    if name_old != name_new or "<lambda>" in name_new:
        return False
    file_old, file_new = (getattr(getattr(f, "__code__", None), "co_filename", f) for f in (old, new))
    return getattr(old, "__module__", None) == getattr(new, "__module__", None) or file_old == file_new


def _function_of(entry: Any) -> Any:
    """The function of an entry that declares more than a function."""
    return getattr(entry, "function", entry)


def _module(entry: Any) -> str:
    return getattr(_function_of(entry), "__module__", None) or "?"


def _origin(entry: Any) -> str:
    function = _function_of(entry)
    return f"{_module(entry)}.{getattr(function, '__qualname__', repr(function))}"
