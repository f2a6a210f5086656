"""Tools written for verl. Classes with `create`, `execute`, `calc_reward` and `release` are named in a YAML file:

tools:
  - class_name: my_package.my_tool.MyTool
    config: {type: native, ...}
    tool_schema: {type: function, function: {name: my_tool, ...}}

One instance of the class serves all conversations; `create` opens one and `release` closes it, as verl calls them. An
entry of `type: mcp` stands for the tools of MCP servers (`mcp: {mcp_servers_config_path, tool_selected_list}`).

Function tools are functions of a Python file under `@function_tool` (verl.tools.function_tool). Each gives its answer,
or (answer, reward), or (answer, reward, metrics).
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Hashable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

from posttrain.conversations.tools.base import Tool, ToolAnswer, redacted
from posttrain.conversations.tools.lookup import find_tool, read_entries
from posttrain.conversations.tools.mcp import read_mcp_tools, read_servers
from posttrain.conversations.tools.schema import secrets_of
from posttrain.errors import UserError, first_line

# Classes that come with verl itself, and the built-in tools that do the same.
_OURS = {"SearchTool": "search", "SandboxFusionTool": "python"}
_METHODS = ("create", "execute", "release")
_MCP_CLASSES = ("MCPBaseTool", "MCPSearchTool")


class VerlTool(Tool):
    """One tool of verl's kind."""

    def __init__(self, inner: Any, schema: dict[str, Any], config: Mapping[str, Any]) -> None:
        self.name, self.schema, self.secrets = schema["function"]["name"], schema, secrets_of(config)
        self.repeatable = getattr(inner, "repeatable", True)
        self._inner, self._instances = inner, dict[Hashable, str]()
        self._as_text = _takes_text(inner.execute)
        self._rewards = _own_reward(type(inner))

    async def open(self, conversation: Hashable, **given: Any) -> None:
        kwargs = dict(given)
        if any(one.kind is one.VAR_KEYWORD for one in inspect.signature(self._inner.create).parameters.values()):
            kwargs.setdefault("create_kwargs", dict(given))  # newer tools look for them here
        made = await self._inner.create(uuid4().hex, **kwargs)
        self._instances[conversation] = made[0] if isinstance(made, tuple) else made

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> ToolAnswer:
        if conversation not in self._instances:
            await self.open(conversation)
        parameters = json.dumps(arguments) if self._as_text else arguments
        said = await self._inner.execute(self._instances[conversation], parameters)
        response, reward, metrics = said if isinstance(said, tuple) else (said, 0.0, {})
        return _answer(response, float(reward or 0.0), metrics)

    async def reward(self, conversation: Hashable) -> float:
        if not self._rewards or conversation not in self._instances:
            return 0.0
        return float(await self._inner.calc_reward(self._instances[conversation]) or 0.0)

    async def close(self, conversation: Hashable) -> None:
        instance = self._instances.pop(conversation, None)
        if instance is not None:
            await self._inner.release(instance)


def read_tools(path: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Tool]:
    """The tools of a YAML file, by name; `settings` of one are laid over its `config`. UserError in words."""
    made: dict[str, Tool] = {}
    for place, entry in enumerate(read_entries(path, "tools", "tools")):
        where = f"tools[{place}] of {path}"
        for tool in _of_servers(entry, where) if _type_of(entry) == "mcp" else [_made(entry, where, settings)]:
            if tool.name in made:
                raise UserError(f"two tools of {path} are called {tool.name}: a model could not tell them apart.")
            made[tool.name] = tool
    return made


def _type_of(entry: Any) -> Any:
    config = entry.get("config") if isinstance(entry, dict) else None
    return config.get("type") if isinstance(config, dict) else None


def _of_servers(entry: dict[str, Any], where: str) -> list[Tool]:
    """The tools of the MCP servers that an entry names, all or those that it selects."""
    of_servers, name = entry.get("mcp"), str(entry.get("class_name")).rpartition(".")[2]
    if name not in _MCP_CLASSES:
        raise UserError(f"{where}: {name} is not run for MCP servers; the class of such an entry is {_MCP_CLASSES[0]}.")
    if not isinstance(of_servers, dict) or not of_servers.get("mcp_servers_config_path"):
        raise UserError(f"{where} has no mcp.mcp_servers_config_path.")
    chosen = of_servers.get("tool_selected_list")
    tools: list[Tool] = [
        tool for one in read_servers(of_servers["mcp_servers_config_path"]) for tool in read_mcp_tools(one, chosen)
    ]
    missing = [one for one in chosen or () if one not in {tool.name for tool in tools}]
    if missing:
        raise UserError(f"{where}: its servers have no tool {missing[0]}.")
    idle = [key for key in entry["config"] if key != "type"]
    if idle:
        words = "calls wait at most multi_turn.tool_timeout_s seconds, and 8 of a tool run at once"
        tools[0].note = f"{', '.join(idle)} of {where} have no effect: {words}."
    return tools


def _made(entry: Any, where: str, settings: Mapping[str, Mapping[str, Any]]) -> Tool:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise UserError(f"{where} has no class_name.")
    config, schema, name = dict(entry.get("config") or {}), entry.get("tool_schema"), entry["class_name"]
    if config.get("type", "native") != "native":
        raise UserError(f"{where} is of type {config['type']!r}; tools are `native` or `mcp`.")
    if schema is not None and not _is_schema(schema):
        raise UserError(f"the tool_schema of {where} is none: it needs function.name and function.parameters.")
    kind = _class(name, where)

    def made(more: Mapping[str, Any]) -> VerlTool:
        full = config | dict(more)
        try:
            inner = kind(config=full, tool_schema=_validated(schema))
            own = schema or plain_schema(inner.get_openai_tool_schema())
        except Exception as error:
            words = redacted(f"{type(error).__name__}: {first_line(error)}", secrets_of(full))
            raise UserError(f"{where}: {name} cannot be made: {words}") from None
        if not _is_schema(own):
            raise UserError(f"{where} has no tool_schema, and {name} gives none.\n  to do:  write its tool_schema")
        return VerlTool(inner, own, full)

    if schema is not None:
        return made(settings.get(schema["function"]["name"]) or {})
    tool = made({})  # only now is it known what it is called
    return made(settings[tool.name]) if settings.get(tool.name) else tool


def _class(name: str, where: str) -> Any:
    try:
        kind = find_tool(name)
    except UserError as error:
        last = name.rpartition(".")[2]
        hint = f'; tools=["{_OURS[last]}"] has the same here' if name.startswith("verl.") and last in _OURS else ""
        raise UserError(f"{where}: {error}{hint}") from error
    missing = [one for one in _METHODS if not inspect.iscoroutinefunction(getattr(kind, one, None))]
    if missing or not inspect.isclass(kind):
        raise UserError(f"{where}: {name} is no tool of verl's kind: it has no `async def {(missing or _METHODS)[0]}`.")
    return kind


def _validated(schema: Any) -> Any:
    """verl's own object for a schema, where the package is there; it has been imported with the class."""
    try:
        return import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    except ImportError:
        return schema


def plain_schema(schema: Any) -> Any:
    return schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema


def _is_schema(schema: Any) -> bool:
    function = schema.get("function") if isinstance(schema, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _takes_text(execute: Any) -> bool:
    """Whether `execute` takes its parameters as JSON text, as in early versions of verl."""
    parameters = list(inspect.signature(execute).parameters.values())
    return len(parameters) > 1 and parameters[1].annotation in (str, "str")


def _own_reward(kind: type) -> bool:
    owner = next((one for one in kind.__mro__ if "calc_reward" in vars(one)), None)
    return owner is not None and owner.__name__ != "BaseTool"


def text_of(response: Any) -> str:
    """The words of a ToolResponse; what else it holds is named, because models here read text alone."""
    if isinstance(response, str):
        return response
    text = getattr(response, "text", None) or ""
    for kind in ("image", "video"):
        left = getattr(response, kind, None)
        if left:
            text += f"\n[{len(left)} {kind}{'s' if len(left) > 1 else ''} left out]"
    return text.lstrip("\n")


def _answer(response: Any, reward: float, metrics: Any) -> ToolAnswer:
    """What a tool of verl's kind gave. It has no place for a cost but a metric of this name."""
    numbers = numbers_of(metrics)
    return ToolAnswer(text_of(response), reward=reward, metrics=numbers, cost=numbers.get("cost", 0.0))


def numbers_of(metrics: Any) -> dict[str, float]:
    items = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(k): float(v) for k, v in items if isinstance(v, int | float) and math.isfinite(v)}


class VerlFunctionTool(Tool):
    """One function."""

    stateless = True

    def __init__(self, inner: Any, read_result: Any) -> None:
        self.name, self.schema = inner.name, plain_schema(inner.tool_schema)
        self.isolated = getattr(inner.fn, "isolated", True)
        self.repeatable = getattr(inner.fn, "repeatable", True)
        self._inner, self._read_result = inner, read_result

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> ToolAnswer:
        response, reward, metrics = self._read_result(await self._inner.call(arguments))
        return _answer(response, float(reward), metrics)


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
