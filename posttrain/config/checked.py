"""Tree, the settings of a program and their rules; and what checks of meaning work on: a typed configuration.

One loader serves `main_ppo` and the supervised trainers, since each has a Tree. Packages above this one know their
engines, models and tools. A module that `posttrain.plugins.checks` names takes part by functions of its own, loaded
without torch:

    def check(checked: Checked) -> Iterator[Finding]: ...                               # settings
    def check_environment(resolved: Resolved, folder: Path) -> Iterator[Problem]: ...   # this machine
"""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain import plugins
from posttrain.config.problem import Problem
from posttrain.config.schema import Section, lookup
from posttrain.config.values import WrongValue, convert
from posttrain.settings import choices_of, range_of
from posttrain.spelling import closest

if TYPE_CHECKING:
    from posttrain.config.merge import Merged, Spellings


# A problem, or a note.
Finding = Problem | str
Settings = TypeVar("Settings")


@dataclass
class Checked:
    """A typed configuration under examination."""

    config: Any
    # Canonical keys that the user set.
    explicit: set[str]
    # Key -> where it was set.
    where: Callable[[str], str]

    def problem(self, what: str, do: str, *keys: str) -> Problem:
        return Problem(what, ", and ".join(dict.fromkeys(self.where(key) for key in keys)), do, keys)


def checks_of_packages(name: str) -> Iterator[Callable[..., Iterator[Any]]]:
    """The functions of this name in the modules that take part."""
    for module in map(importlib.import_module, plugins.checks):
        if hasattr(module, name):
            yield getattr(module, name)


def nearest_name(value: Any, known: tuple[str, ...]) -> str:
    """Advice for a name that is not known."""
    close = closest(str(value), known)
    return f"did you mean `{close}`?" if close else "choose one of them"


def check_choice(
    checked: Checked, key: str, known: tuple[str, ...], elsewhere: Mapping[tuple[str, str], str], own: str = ""
) -> Iterator[Finding]:
    """A name that is not known; `elsewhere` answers (key, name) that other systems have, `own` says how users add one
    of their own."""
    value = lookup(checked.config, key)
    if value is None or value in known:
        return
    if (key, value) in elsewhere:
        yield checked.problem(f"`{key}={value}` cannot be used.", elsewhere[key, value], key)
    else:
        what = f"`{key}={value}` is not known; known: {', '.join(known)}."
        yield checked.problem(what, nearest_name(value, known) + own, key)


# -- free dicts that their owners check against a dataclass -----------------------------------------------------------
def settings_of(kind: type[Settings], given: Mapping[str, Any]) -> Settings:
    """The settings of a checked dict."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: convert(value, hints[name]) for name, value in given.items()})


def check_dict(
    checked: Checked, key: str, kind: type[Settings], advice: str = "give a larger number, or leave it out"
) -> Generator[Finding, None, Settings | None]:
    """Findings about the entries of a dict; returns its settings, or None if there are any. `advice` is for numbers
    out of range."""
    given, is_right = lookup(checked.config, key), True
    for name, value in given.items():
        for what, do in _faults(key, name, value, kind, advice):
            is_right = False
            yield checked.problem(what, do, key)
    return settings_of(kind, given) if is_right else None


def _faults(key: str, name: str, value: Any, kind: type, advice: str) -> Iterator[tuple[str, str]]:
    """(what is wrong, what to do)."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if name not in fields:
        yield f"`{key}.{name}` is not known; known: {', '.join(fields)}.", nearest_name(name, tuple(fields))
        return
    try:
        typed = convert(value, typing.get_type_hints(kind)[name])
    except WrongValue as error:
        yield f"`{key}.{name}`: {error}.", f"give {key}.{name} such a value"
        return
    known, limits = choices_of(fields[name]), range_of(fields[name])
    if typed is not None and known and typed not in known:
        yield f"`{key}.{name}={typed}` is not known; known: {', '.join(known)}.", nearest_name(typed, known)
    if typed is not None and limits is not None and not limits.allows(typed):
        yield f"`{key}.{name}={typed}` must be {limits.words}.", advice


@dataclass(frozen=True)
class Tree:
    """One tree of settings and the rules that belong to it."""

    # Name of the main file in `trainer/config/`.
    main: str
    root: type[Section]
    # The section of the model that is trained.
    model: str
    spellings: Spellings
    # The answer to a start with no argument at all.
    nothing_given: Callable[[], Problem]
    # Settings that follow from others; gets the keys that a Python caller hands over as objects.
    derive: Callable[[Merged, frozenset[str]], None]
    # Names that a file of the user's may register.
    check_names: Callable[[Merged, Path], None]
    # Problems and notes about the meaning of the values.
    check: Callable[[Checked], Iterable[Finding]]
    # Modules that are trained whole beside adapters, so that an adapter folder may hold them.
    heads: tuple[str, ...] = ()
