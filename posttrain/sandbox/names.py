"""Decides which names of test code mean the program: those that neither the tests nor Python define.

Python's own functions and modules stay Python's, so a program cannot replace `abs` or `math`. The exceptions are tests
of a function with such a name (`assert sum(10, 15) == 6`), and imports from `solution`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from dataclasses import dataclass

from posttrain.sandbox.objects import MODULE  # tests may import the program under this name

# Modules that tests use without importing them, like those of the standard library.
USUAL = {"np": "numpy", "pd": "pandas"}
_WRAPPERS = {
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "int", "isinstance", "len", "list", "map",
    "print", "range", "repr", "round", "set", "sorted", "str", "tuple", "type", "zip",
}  # fmt: skip
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.lru_cache(maxsize=16)
def list_nodes(tree: ast.AST) -> list[ast.AST]:
    """List all nodes of a tree. Cached, because several questions are asked about the same tree."""
    return list(ast.walk(tree))


@dataclass
class Names:
    """The names that one test uses."""

    # Names that only the program can define.
    program: set[str]
    # Names that the tests import from `solution`, whatever Python has under the same name.
    imported: set[str]
    # Modules that the tests use, perhaps without importing them.
    modules: set[str]


def classify_names(tree: ast.AST, entry: str | None, replaced: set[str]) -> Names:
    """Sort the names of a test. `entry` names the function under test, if known; `replaced` are tested builtins."""
    called = called_names(tree)
    own = _defined_names(tree)
    program, modules = set(), set()
    for name in {node.id for node in list_nodes(tree) if isinstance(node, ast.Name)} - own - {MODULE}:
        if name.startswith("__") or (hasattr(builtins, name) and name not in replaced):
            continue
        if name not in called and (name in sys.stdlib_module_names or name in USUAL):
            modules.add(name)
        else:
            program.add(name)
    return Names(program | ({entry} if entry else set()), _find_imported_names(tree), modules)


def _defined_names(tree: ast.AST) -> set[str]:
    # Functions and classes that the tests define. Methods are left out: a bare name never means one.
    methods = {id(one) for node in list_nodes(tree) if isinstance(node, ast.ClassDef) for one in node.body}
    return {node.name for node in list_nodes(tree) if isinstance(node, _DEFINITIONS) and id(node) not in methods}


def builtins_under_test(trees: list[ast.AST]) -> set[str]:
    """Find Python's own functions that the tests mean as the program's: those that every test calls.

    Only if the tests use no other name that could be the program's: in `assert abs(f(1) - 2) < 1e-6` a program must not
    replace `abs`. Of several, the innermost one is meant: in `abs(max(a) - 2) < 1e-6` that is `max`.
    """
    if not trees or any(_uses_program_names(tree) for tree in trees):
        return set()
    common = {name for name in set.intersection(*map(called_names, trees)) if hasattr(builtins, name)}
    return common - _WRAPPERS or common & set.intersection(*map(_innermost, trees))


def called_names(tree: ast.AST) -> set[str]:
    calls = [node.func for node in list_nodes(tree) if isinstance(node, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def loaded_names(tree: ast.AST) -> set[str]:
    return {node.id for node in list_nodes(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def names_only_in_annotations(tree: ast.AST) -> set[str]:
    """Names that annotations use, and that neither the tests nor Python define."""
    nodes = list_nodes(tree)
    notes = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    used = {node.id for note in notes if note is not None for node in ast.walk(note) if isinstance(node, ast.Name)}
    return {name for name in used - _bound_names(tree) if not hasattr(builtins, name)}


def _innermost(tree: ast.AST) -> set[str]:
    # Functions in whose arguments no other function is called.
    calls = [node for node in list_nodes(tree) if isinstance(node, ast.Call)]
    inner = [call for call in calls if sum(isinstance(node, ast.Call) for node in ast.walk(call)) == 1]
    return {call.func.id for call in inner if isinstance(call.func, ast.Name)}


def _uses_program_names(tree: ast.AST) -> bool:
    bound = _bound_names(tree)
    free = {name for name in loaded_names(tree) - bound if not hasattr(builtins, name)}
    return MODULE in bound or bool(_find_imported_names(tree)) or bool(free - sys.stdlib_module_names - USUAL.keys())


def _bound_names(tree: ast.AST) -> set[str]:
    bound = _defined_names(tree)
    bound |= {node.id for node in list_nodes(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in list_nodes(tree) if isinstance(node, ast.arg)}
    imports = [node for node in list_nodes(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return bound | {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def _find_imported_names(tree: ast.AST) -> set[str]:
    names = set()
    for node in list_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module == MODULE:
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == MODULE:
            names.add(node.attr)
    return names
