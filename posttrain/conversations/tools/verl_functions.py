"""Function tools written for verl: functions of a Python file under `@function_tool` (verl.tools.function_tool).

A function gives its answer, or (answer, reward), or (answer, reward, metrics).
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolAnswer
from posttrain.conversations.tools.verl_tools import numbers_of, plain_schema, text_of
from posttrain.errors import UserError, first_line


class VerlFunctionTool(Tool):
    """One function."""

    stateless = True

    def __init__(self, inner: Any, read_result: Any) -> None:
        self.name, self.schema = inner.name, plain_schema(inner.tool_schema)
        self.isolated = getattr(inner.fn, "isolated", True)
        self._inner, self._read_result = inner, read_result

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> ToolAnswer:
        response, reward, metrics = self._read_result(await self._inner.call(arguments))
        return ToolAnswer(text_of(response), reward=float(reward), metrics=numbers_of(metrics))


def read_function_tools(path: str) -> list[Tool]:
    """The tools of a file; UserError if it has none or cannot be loaded."""
    try:
        verl = importlib.import_module("verl.tools.function_tool")
    except ImportError:
        raise UserError(
            f"multi_turn.function_tool_path={path} needs the package posttrain-verl (compat/README.md).\n"
            f"  to do:  install it, or name the functions: actor_rollout_ref.rollout.tools=[{path}:NAME]"
        ) from None
    if not Path(path).is_file():
        raise UserError(f"multi_turn.function_tool_path={path}: no such file.")
    try:
        found = verl.load_function_tools_from_path(path)
    except Exception as error:
        raise UserError(
            f"multi_turn.function_tool_path={path} cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not found:
        raise UserError(f"{path} registers no tool.\n  to do:  write @function_tool above its functions")
    return [VerlFunctionTool(one, verl.normalize_function_tool_return) for one in found]
