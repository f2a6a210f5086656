"""The settings of a tree as a flat table: canonical dotted key -> type, default, sentence; for all checks of keys."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any

from posttrain.config.base import Section
from posttrain.config.declared import declared_sentence, placed_settings
from posttrain.config.docs import sentences_of
from posttrain.settings import Range, choices_of, range_of


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting."""

    key: str
    hint: Any
    default: Any
    sentence: str
    range: Range | None = None
    """What a number must be; null is never tested."""
    choices: tuple[str, ...] = ()
    """The names that it takes, besides null where the type allows it; empty for any text."""

    @property
    def free_keys(self) -> bool:
        """Whether the value is a dict whose own keys are the user's."""
        return typing.get_origin(self.hint) is dict


def leaves(root: type[Section]) -> dict[str, Leaf]:
    """Every setting of a tree by its canonical key, in the order of the classes."""
    return _leaves(root, placed_settings())


@cache
def _leaves(root: type[Section], declared: tuple[type, ...]) -> dict[str, Leaf]:
    return {leaf.key: leaf for leaf in _walk(root(), "")}


def sections(root: type[Section]) -> dict[str, type[Section]]:
    """Every section of a tree by its dotted name."""
    return _sections(root, placed_settings())


@cache
def _sections(root: type[Section], declared: tuple[type, ...]) -> dict[str, type[Section]]:
    found: dict[str, type[Section]] = {}

    def visit(section: Section, name: str) -> None:
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if isinstance(value, Section):
                found[name + field.name] = type(value)
                visit(value, f"{name}{field.name}.")

    visit(root(), "")
    return found


def _walk(section: Section, prefix: str) -> list[Leaf]:
    hints = typing.get_type_hints(type(section))
    sentences = sentences_of(type(section))
    found: list[Leaf] = []
    for field in dataclasses.fields(section):
        value, key = getattr(section, field.name), prefix + field.name
        if isinstance(value, Section):
            found += _walk(value, key + ".")
        else:
            sentence = sentences.get(field.name) or declared_sentence(field)
            takes = range_of(field), choices_of(field)
            found.append(Leaf(key, hints[field.name], value, sentence, *takes))
    return found


def leaf_of(root: type[Section], key: str) -> Leaf | None:
    """The setting that a key names: itself, or the free-form dict that it lies in."""
    table = leaves(root)
    if key in table:
        return table[key]
    parts = key.split(".")
    for end in range(len(parts) - 1, 1, -1):
        leaf = table.get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if leaf.free_keys else None
    return None


def build(root: type[Section], values: dict[str, Any]) -> Any:
    """The typed tree with these values by canonical key; the others keep their defaults."""
    config = root()
    for key, value in values.items():
        assign(config, key, value)
    return config


def assign(config: Section, key: str, value: Any) -> None:
    """Set one canonical key of a typed tree."""
    *path, name = key.split(".")
    section: Any = config
    for part in path:
        section = getattr(section, part)
    setattr(section, name, value)


def lookup(config: Section, key: str) -> Any:
    """The value of one canonical key of a typed tree."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
