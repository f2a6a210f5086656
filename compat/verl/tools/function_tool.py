"""Functions as tools: `@function_tool` reads the schema from a function's type hints and its docstring."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

logger = logging.getLogger(__name__)
FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}
"""File -> what it registered when it was run, once."""


@dataclass
class FunctionTool:
    """A function under the name that the model calls it by."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """The function's result; a plain function runs in a thread, so that others are not held up."""
        if self.is_async:
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


def function_tool(name: str | Callable[..., Any] | None = None, *, schema: Any = None) -> Any:
    """Decorator, with or without brackets: makes a function a tool under its own name or `name`.

    Every parameter needs a type hint and a line below `Args:` of the docstring, unless `schema` is given.
    """

    def decorate(function: Callable[..., Any], called: str | None) -> Callable[..., Any]:
        own = called or function.__name__
        made = OpenAIFunctionToolSchema.model_validate(schema) if schema is not None else _schema_of(function, own)
        known = FUNCTION_TOOL_REGISTRY.get(own)
        if known is not None and known.fn is not function:
            raise ValueError(
                f"Function tool '{own}' is already registered to {_address(known.fn)}; "
                f"refusing to overwrite with {_address(function)}."
            )
        FUNCTION_TOOL_REGISTRY[own] = FunctionTool(own, function, made, inspect.iscoroutinefunction(function))
        return function

    if callable(name) and schema is None:
        return decorate(name, None)
    return lambda function: decorate(function, name if isinstance(name, str) else None)


def get_function_tool(name: str) -> FunctionTool:
    """A registered tool; KeyError if there is none of that name."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"Function tool '{name}' not found in registry: is the file that defines it loaded?")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Run a Python file, once, and give the tools that it registered."""
    file = Path(path).absolute()
    if not file.is_file():
        raise FileNotFoundError(f"function_tool_path does not exist: {path}")
    if str(file) not in _LOADED_FUNCTION_TOOL_PATHS:
        before = set(FUNCTION_TOOL_REGISTRY)
        module_name = "_verl_function_tools_" + "_".join(file.with_suffix("").parts[1:])
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        new = sorted(set(FUNCTION_TOOL_REGISTRY) - before)
        if not new:
            logger.warning("function_tool_path '%s' loaded but no @function_tool decorators found", path)
        _LOADED_FUNCTION_TOOL_PATHS[str(file)] = [FUNCTION_TOOL_REGISTRY[name] for name in new]
    return _LOADED_FUNCTION_TOOL_PATHS[str(file)]


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """(what the tool answers, reward, metrics) of what a function returned: an answer, or a tuple of them."""
    if not isinstance(ret, tuple):
        return _as_response(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(
            f"@function_tool return tuple must have length 1, 2, or 3 (got length {len(ret)}: {ret!r}). "
            "Use (response,), (response, reward), or (response, reward, metrics)."
        )
    response, reward, metrics = (*ret, *(None,) * (3 - len(ret)))
    return _as_response(response), 0.0 if reward is None else float(reward), {} if metrics is None else dict(metrics)


def _as_response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
    return ToolResponse(text=text)


def _schema_of(function: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    from transformers.utils.chat_template_utils import get_json_schema

    several = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if several:
        raise ValueError(
            f"@function_tool '{name}' ({_address(function)}) declares variadic parameter(s) {several}, which no schema "
            "can express. Name each parameter."
        )
    schema = get_json_schema(function)
    schema["function"]["name"] = name
    return OpenAIFunctionToolSchema.model_validate(schema)


def _address(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
