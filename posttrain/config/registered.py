"""Names that a user's own file registers: found by reading the files of the working folder, without running them."""

from __future__ import annotations

import ast
from pathlib import Path


def files_that_register(name: str, function: str, folder: Path) -> list[Path]:
    """Python files directly in `folder` that call (or decorate with) `function(name)`."""
    found = []
    for file in sorted(folder.glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if name in text and function in text and _registers(text, name, function):
            found.append(file)
    return found


def _registers(text: str, name: str, function: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(_called(call) == function and name in _texts(call) for call in calls)


def _called(call: ast.Call) -> str | None:
    return getattr(call.func, "id", None) or getattr(call.func, "attr", None)


def _texts(call: ast.Call) -> list[object]:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
