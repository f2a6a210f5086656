"""Tools by name: those that are built in, those that `register_tool` makes known, and those of a user's file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from posttrain.conversations.settings import TurnSettings
from posttrain.conversations.tools.base import Tool, ToolAnswer, answer_of
from posttrain.conversations.tools.calculator import calculator
from posttrain.conversations.tools.forks import Serve
from posttrain.conversations.tools.lookup import called_name, find_tool, is_place
from posttrain.conversations.tools.mcp import PREFIX, parse_server, read_mcp_tools, read_servers
from posttrain.conversations.tools.python import PythonTool
from posttrain.conversations.tools.schema import PLACE, read_settings, schema_of, secrets_of
from posttrain.conversations.tools.search import SearchTool
from posttrain.conversations.tools.threads import Threads
from posttrain.conversations.tools.verl_tools import read_function_tools, read_tools
from posttrain.conversations.tools.worker import serve_calls
from posttrain.errors import UserError
from posttrain.external import import_external
from posttrain.registry import Registry
from posttrain.spelling import closest


class FunctionTool(Tool):
    """Calls `function(**arguments)`, in a worker process unless the function says `isolated = False`.

    Keyword-only parameters come from the settings, or from the conversation's row, which goes before them."""

    def __init__(
        self, function: Callable[..., Any], settings: Mapping[str, Any] | None = None, name: str | None = None
    ) -> None:
        self.name = name or getattr(function, "__name__", "tool")
        self.schema = schema_of(function, self.name)
        self._function, self._threads = function, Threads()
        own = str(getattr(function, "__module__", "")).startswith("posttrain.")
        self.isolated, self.stateless = getattr(function, "isolated", not own), True
        self.repeatable = getattr(function, "repeatable", True)
        self.at_once = getattr(function, "at_once", self.at_once)
        self._settings = read_settings(self.name, function, settings or {}, rest=True)
        self.secrets = secrets_of(self._settings)
        parameters = inspect.signature(function).parameters.values()
        own = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
        self._own = {one.name for one in own}
        self._needed = [one.name for one in own if one.default is one.empty and one.name not in self._settings]
        self._given: dict[Hashable, dict[str, Any]] = {}

    async def open(self, conversation: Hashable, **given: Any) -> None:
        mine = {key: value for key, value in given.items() if key in self._own}
        missing = [key for key in self._needed if key not in mine]
        if missing:
            raise UserError(
                f"the tool {self.name} needs {missing[0]}: neither {PLACE}.{self.name}.{missing[0]} nor the row's "
                f"tools_kwargs.{self.name}.create_kwargs gives it"
            )
        if mine:
            self._given[conversation] = mine

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str | ToolAnswer:
        kwargs = {**self._settings, **self._given.get(conversation, {}), **arguments}
        if inspect.iscoroutinefunction(self._function):
            return answer_of(await self._function(**kwargs))
        # A worker process has nothing else to do; in the trainer a thread keeps the tool's event loop free.
        made = self._function(**kwargs) if self.isolated else await self._threads.run(self._function, **kwargs)
        return answer_of(await made if inspect.isawaitable(made) else made)  # a decorator may hide `async def`

    async def close(self, conversation: Hashable) -> None:
        self._given.pop(conversation, None)


Maker = Callable[[Mapping[str, Any]], Tool]
Made = TypeVar("Made", bound=Callable[..., Any])
# Name -> a function, or a subclass of Tool.
TOOLS: Registry[Any] = Registry("tool")


def register_tool(name: str) -> Callable[[Made], Made]:
    """Makes a function, or a subclass of Tool that takes its settings as keywords, known under a name; one that is
    taken already is an error."""
    return TOOLS.register(name)


def make_tools(
    names: Sequence[str],
    settings: Mapping[str, Mapping[str, Any]],
    *,
    config_path: str | None = None,
    function_path: str | None = None,
    mcp_path: str | None = None,
) -> dict[str, Tool]:
    """The tools of these names, by the names that the model calls them; UserError in words if one cannot be had.

    All tools of files are given, whether they are named or not: `config_path` is a YAML file of tools in verl's form,
    `function_path` a Python file of verl's function tools, `mcp_path` a JSON file of MCP servers."""
    left = {name: dict(values or {}) for name, values in settings.items()}
    tools = read_tools(config_path, left) if config_path else {}
    left = {name: values for name, values in left.items() if name not in tools}
    made = read_function_tools(function_path) if function_path else []
    for server in read_servers(mcp_path) if mcp_path else []:
        made += read_mcp_tools(server)
    known = {*tools, *(tool.name for tool in made)}
    for name in [name for name in names if name not in known]:
        made += read_mcp_tools(parse_server(name)) if name.startswith(PREFIX) else [_make(name, left)]
    for tool in made:
        if tool.name in tools:
            raise UserError(f"two tools are called {tool.name}: a model could not tell them apart.")
        tools[tool.name] = tool
    for tool in tools.values():
        if type(tool.at_once) is not int or tool.at_once < 1:  # with 0 every call would wait for ever
            raise UserError(f"the tool {tool.name} has at_once={tool.at_once!r}: it must be an integer, 1 or more.")
    if left:
        name = next(iter(left))
        near = closest(name, tools)
        hint = f"did you mean {near}? " if near else ""
        raise UserError(
            f"{PLACE}.{name} is set, but {name} is none of the tools: {hint}"
            f"actor_rollout_ref.rollout.tools has {', '.join(tools) or 'none'}."
        )
    return tools


def make_tools_of(turns: TurnSettings) -> dict[str, Tool]:
    """The tools of a run."""
    return make_tools(
        turns.tools,
        turns.tool_config,
        config_path=turns.tool_config_path,
        function_path=turns.function_tool_path,
        mcp_path=turns.mcp_config_path,
    )


def serve_tools(library: str | None, turns: TurnSettings, names: Sequence[str]) -> Serve:
    """What worker processes of these tools of a run do. Called on another machine, in the process that they are forked
    from. `library` is the user's module that may register some."""
    if library:
        import_external(library)
    tools = make_tools_of(turns)
    if missing := [name for name in names if name not in tools]:
        raise UserError(f"there is no tool {missing[0]!r}")
    return lambda channel, _: serve_calls(channel, tools)


def name_for_model(name: str) -> str:
    """What a model calls the tool of an entry of `actor_rollout_ref.rollout.tools`. An MCP server may have several, and
    keeps the name of its entry."""
    return name if name.startswith(PREFIX) else _found(name)[0]


def _make(name: str, settings: dict[str, dict[str, Any]]) -> Tool:
    """The tool of a name, with its part of the settings, which is taken out of them."""
    called, maker = _found(name)
    return maker(settings.pop(called, {}))


def _found(name: str) -> tuple[str, Maker]:
    """(the name under which the tool's settings are given, its maker)."""
    if name in TOOLS:
        return name, _maker(TOOLS[name], name)
    if is_place(name):
        called = called_name(name)
        return called, _maker(find_tool(name), called)
    longer = [known for known in TOOLS if name and known.startswith(name)]
    near = closest(name, TOOLS) or (longer[0] if len(longer) == 1 else None)
    hint = f" Did you mean {near}?" if near else ""
    raise UserError(
        f"there is no tool {name!r}.{hint} Known: {', '.join(TOOLS)}.\n"
        "  to do:  use one of these, or name your own: path/to/file.py:function"
    )


def _maker(source: Any, name: str) -> Maker:
    def make(settings: Mapping[str, Any]) -> Tool:
        if not inspect.isclass(source):
            return FunctionTool(source, settings, name)
        if not issubclass(source, Tool):
            base = "posttrain.conversations.tools.base.Tool"
            raise UserError(f"{source.__name__} is no tool: it must derive from {base}.")
        tool = source(**read_settings(name, source, settings))
        tool.secrets = tool.secrets or secrets_of(settings)
        return tool

    return make


register_tool("calculator")(calculator)
register_tool("python")(PythonTool)
register_tool("search")(SearchTool)
