"""The sentence under each field of a settings class, read from the source: one text serves YAML, docs and CLI."""

from __future__ import annotations

import ast
import inspect
from functools import cache


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
