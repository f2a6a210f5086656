"""All tools of a run as objects: those of verl's file of tool classes, and functions marked with `function_tool`."""

from __future__ import annotations

import importlib
from typing import Any

from verl.tools.function_tool import load_function_tools_from_path
from verl.tools.schemas import OpenAIFunctionToolSchema


def get_tool_class(cls_name: str) -> Any:
    """The class at `package.module.Class`."""
    module, _, name = cls_name.rpartition(".")
    return getattr(importlib.import_module(module), name)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The tools that a YAML file declares: `class_name`, `config` and `tool_schema` of each."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(OmegaConf.load(tools_config_file), resolve=True)
    return [_made(one) for one in found["tools"]]


def _made(declared: dict[str, Any]) -> Any:
    if declared["config"]["type"] != "native":
        raise NotImplementedError(
            f"tool type {declared['config']['type']!r}: a run opens MCP servers itself (multi_turn.mcp_config_path)"
        )
    schema = declared.get("tool_schema")
    parsed = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
    return get_tool_class(declared["class_name"])(config=declared["config"], tool_schema=parsed)


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """The tools of both files; a name that both have is an error."""
    declared = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    functions = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    both = sorted({tool.name for tool in declared} & {tool.name for tool in functions})
    if both:
        raise ValueError(f"Function tool name(s) {both} collide with tools already declared in '{tool_config_path}'")
    return [*declared, *functions]
