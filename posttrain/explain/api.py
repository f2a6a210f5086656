"""The public names of the package, read from its source without importing it: signature and first sentence of each."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
# Modules whose `__all__` is the API -> what they are for.
MODULES = {
    "posttrain": "train from Python, and the batch that flows between the stages",
    "posttrain.algorithms": "estimators, losses, KL and aggregation, as functions on tensors",
    "posttrain.rewards": "scorers, and reading answers",
    "posttrain.data": "rows, data sets, samplers",
    "posttrain.checkpoint": "saving and verifying",
    "posttrain.engine": "the train engine's contract",
}


def api() -> list[str]:
    """Lines of the page: a table of names per module."""
    lines: list[str] = []
    for module, what in MODULES.items():
        lines += [f"## {module}", "", f"{what[0].upper()}{what[1:]}.", "", "| name | |", "|---|---|"]
        lines += [f"| `{signature}` | {sentence} |" for signature, sentence in public(module)]
        lines.append("")
    return lines[:-1]


def public(module: str) -> Iterator[tuple[str, str]]:
    """(signature, first sentence) of each function and class in a module's `__all__`; other names are values."""
    tree = _tree(module)
    for name in sorted(_all(tree), key=str.lower):
        node = find(module, name)
        if node is not None:
            yield _signature(name, node), _sentence(node)


def find(module: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """Where a name is defined, followed through imports; None for a plain value."""
    tree = _tree(module)
    for node, behind in pairwise(tree.body):  # an enumeration that is made from names: a class by assignment
        if not isinstance(node, ast.Assign) or getattr(node.targets[0], "id", "") != name:
            continue
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "StrEnum":
            return ast.ClassDef(name, bases=[], keywords=[], body=[behind], decorator_list=[])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("posttrain"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(node.module, alias.name)
    return None


def _tree(module: str) -> ast.Module:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return []


def _signature(name: str, node: ast.FunctionDef | ast.ClassDef) -> str:
    """`name(parameters)` without types and defaults; a class is its name."""
    if isinstance(node, ast.ClassDef):
        return name
    taken = node.args
    words = [one.arg for one in (*taken.posonlyargs, *taken.args)]
    words += [f"*{taken.vararg.arg}"] if taken.vararg else ["*"] if taken.kwonlyargs else []
    words += [one.arg for one in taken.kwonlyargs]
    words += [f"**{taken.kwarg.arg}"] if taken.kwarg else []
    return f"{name}({', '.join(words)})"


def _sentence(node: ast.FunctionDef | ast.ClassDef) -> str:
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return text.replace("|", "\\|")
