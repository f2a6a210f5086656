"""The settings of a tree as a flat table: canonical dotted key -> type, default, sentence. All checks of keys read it.

The sentence under a field is read from the source: one text serves the YAML tree, the docs and the command line.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from functools import cache
from typing import Any

from posttrain.config.base import Section


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting."""

    key: str
    hint: Any
    default: Any
    sentence: str

    @property
    def free_keys(self) -> bool:
        """Whether the value is a dict whose own keys are the user's."""
        return typing.get_origin(self.hint) is dict


@cache
def leaves(root: type[Section]) -> dict[str, Leaf]:
    """Every setting of a tree by its canonical key, in the order of the classes."""
    return {leaf.key: leaf for leaf in _walk(root(), "")}


@cache
def sections(root: type[Section]) -> dict[str, type[Section]]:
    """Every section of a tree by its dotted name."""
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
            found.append(Leaf(key, hints[field.name], value, sentences.get(field.name, "")))
    return found


@cache
def _module_sentences(path: str) -> dict[str, dict[str, str]]:
    """Class name -> field name -> sentence, for one source file."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return {node.name: _class_sentences(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_sentences(node: ast.ClassDef) -> dict[str, str]:
    sentences = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            sentences[field.target.id] = " ".join(str(below.value.value).split())  # type: ignore[union-attr]
    return sentences


def sentences_of(section: type) -> dict[str, str]:
    """Field name -> sentence of a settings class and its bases; fields without one (nested sections) are absent."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        found |= _module_sentences(inspect.getfile(kind)).get(kind.__name__, {})
    return found


def heading_of(section: type) -> str:
    """The class's own docstring on one line, without its example."""
    text = " ".join((section.__doc__ or "").split())
    return text.split(" Example:")[0]


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
