"""Tools of an MCP server: `actor_rollout_ref.rollout.tools=["mcp:python server.py"]`, or `["mcp:http://127.0.0.1:8000/mcp"]`.

Servers of a JSON file (`mcpServers`, as editors and verl have it) are named by `multi_turn.mcp_config_path`.

The package mcp (1.x and 2.x) is imported in processes of their own alone: in one that lists the tools at the start, and
in the worker processes of tools, each of which has a session with the server, or a server of its own.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from posttrain.conversations.tools.base import Tool, ToolFault
from posttrain.errors import UserError

PREFIX = "mcp:"
_START_S = 60.0
_HOW = "  to do:  give the command that starts it (mcp:python server.py), or its address (mcp:http://HOST:PORT/mcp)"


@dataclass(frozen=True)
class McpServer:
    """How a server is started or reached."""

    name: str
    """For messages."""
    url: str = ""
    command: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()

    @property
    def secrets(self) -> list[str]:
        """Tokens and variables, which no message may show."""
        shown = [value for pairs in (self.headers, self.env) for _, value in pairs]
        return sorted({word for value in shown for word in (value, value.removeprefix("Bearer ")) if word}, key=len)[
            ::-1
        ]

    def __str__(self) -> str:
        return self.name


def parse_server(name: str) -> McpServer:
    """The server that a run names: a command, or an address."""
    server = name.removeprefix(PREFIX).strip()
    if server.startswith(("http://", "https://")):
        return McpServer(server, url=server)
    try:
        command = tuple(shlex.split(server))
    except ValueError as error:
        raise UserError(f"the command of the MCP server {server} cannot be split into words: {error}.") from None
    if not command:
        raise UserError(f"the tools {name} name no MCP server.\n{_HOW}")
    return McpServer(server, command=command)


def read_servers(path: str) -> list[McpServer]:
    """The servers of a JSON file: `{"mcpServers": {NAME: {"command", "args", "env"} or {"url", "headers"}}}`."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))["mcpServers"]
        return [_server_of(str(name), dict(entry)) for name, entry in entries.items()]
    except OSError as error:
        raise UserError(f"the file of MCP servers {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f'the file of MCP servers {path} is not of the form {{"mcpServers": {{NAME: {{"command": ..., "args": '
            '[...]}} or {"url": ...}}}.'
        ) from None


def _server_of(name: str, entry: Mapping[str, Any]) -> McpServer:
    if not (entry.get("url") or entry.get("command")):
        raise KeyError(name)
    headers = {str(key): str(value) for key, value in (entry.get("headers") or {}).items()}
    if entry.get("auth_token"):  # verl's spelling
        headers.setdefault("Authorization", f"Bearer {entry['auth_token']}")
    command = (str(entry["command"]), *map(str, entry.get("args") or ())) if not entry.get("url") else ()
    env = tuple((str(key), str(value)) for key, value in (entry.get("env") or {}).items())
    return McpServer(name, str(entry.get("url") or ""), command, tuple(headers.items()), env)


class McpTool(Tool):
    """One tool of a server. Nothing is kept between calls but the session."""

    stateless = True
    at_once = 8

    def __init__(self, server: McpServer, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name, self.server, self.secrets = name, server, server.secrets
        function = {"name": name, "description": description, "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def call(self, conversation: Hashable, arguments: dict[str, Any]) -> str:
        session = await _Session.of(self.server)
        try:
            result = await session.client.call_tool(self.name, arguments)
        except Exception:
            _Session.drop(self.server)  # it may have ended: the next call starts another
            raise
        text = "\n".join(_text(part) for part in result.content)
        if _either(result, "is_error", "isError"):
            raise ToolFault(text or "The tool failed.")
        return text


def read_mcp_tools(server: McpServer, chosen: Sequence[str] | None = None) -> list[McpTool]:
    """The tools of a server, all or those of these names; UserError if they cannot be had."""
    if importlib.util.find_spec("mcp") is None:
        raise UserError(f"the tools {PREFIX}{server} need the package mcp.\n  to do:  pip install 'posttrain[mcp]'")
    try:
        made = subprocess.run(
            [sys.executable, "-m", "posttrain.conversations.tools.mcp"],
            input=json.dumps(asdict(server)),  # not an argument: those are shown to everybody on the machine
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
        listed = json.loads(made.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise UserError(
            f"the MCP server {server} did not list its tools within {_START_S:g} seconds.\n"
            "  to do:  check that it speaks MCP: by its standard input and output, or at this address"
        ) from None
    except (IndexError, ValueError):
        *own, reason = _lines(made.stderr, server.secrets) or ["it gave no answer"]
        wrote = f"\n  it wrote:  {own[-1]}" if own else ""
        raise UserError(f"the MCP server {server} cannot be reached: {reason}.{wrote}\n{_HOW}") from None
    if not listed:
        raise UserError(f"the MCP server {server} has no tools.")
    found = {one[0]: McpTool(server, *one) for one in listed}
    return list(found.values()) if chosen is None else [tool for name, tool in found.items() if name in chosen]


def _lines(text: str, secrets: Sequence[str]) -> list[str]:
    """What the listing process and the server that it started wrote, without secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return [line for one in text.splitlines() if (line := one.strip(" |+-"))]


class _Session:
    """A session with a server, held open by a task of its own: MCP's clients must end where they began."""

    opened: dict[McpServer, asyncio.Future[_Session]] = {}  # noqa: RUF012

    def __init__(self, client: Any) -> None:
        self.client = client

    @classmethod
    async def of(cls, server: McpServer) -> _Session:
        if server not in cls.opened:
            cls.opened[server] = asyncio.get_running_loop().create_future()
            cls._task = asyncio.create_task(cls._hold(server, cls.opened[server]))
        return await cls.opened[server]

    @classmethod
    def drop(cls, server: McpServer) -> None:
        cls.opened.pop(server, None)

    @classmethod
    async def _hold(cls, server: McpServer, opened: asyncio.Future[_Session]) -> None:
        try:
            # A forked worker's stderr is no file, and a server wants one.
            with open(os.devnull, "w") as devnull:
                async with AsyncExitStack() as stack:
                    opened.set_result(cls(await open_session(server, stack, devnull)))
                    await asyncio.Event().wait()
        except BaseException as error:
            cls.drop(server)
            if not opened.done():
                words = _first_cause(error)
                opened.set_exception(RuntimeError(f"the MCP server cannot be reached: {words}"))


async def open_session(server: McpServer, stack: AsyncExitStack, errlog: TextIO) -> Any:
    """An initialised client session, which lives as long as `stack`. A server that is started for it writes its errors
    to `errlog`."""
    from mcp import ClientSession, StdioServerParameters  # pyright: ignore

    if server.url:
        read, write, *_ = await stack.enter_async_context(await _connect(server, stack))
    else:
        from mcp.client.stdio import stdio_client  # pyright: ignore

        command, *arguments = server.command
        env = {**os.environ, **dict(server.env)}
        parameters = StdioServerParameters(command=command, args=arguments, env=env)
        read, write = await stack.enter_async_context(stdio_client(parameters, errlog=errlog))
    session = await stack.enter_async_context(ClientSession(read, write))
    await session.initialize()
    return session


async def _connect(server: McpServer, stack: AsyncExitStack) -> Any:
    from mcp.client import streamable_http  # pyright: ignore

    if not hasattr(streamable_http, "streamable_http_client"):  # early 1.x
        return streamable_http.streamablehttp_client(server.url, headers=dict(server.headers) or None)
    if not server.headers:
        return streamable_http.streamable_http_client(server.url)
    client = await stack.enter_async_context(streamable_http.create_mcp_http_client(headers=dict(server.headers)))
    return streamable_http.streamable_http_client(server.url, http_client=client)


def _either(thing: Any, new: str, old: str) -> Any:
    """An attribute by its name in mcp 2.x, or in 1.x."""
    return getattr(thing, new) if hasattr(thing, new) else getattr(thing, old)


def _text(part: Any) -> str:
    return part.text if getattr(part, "type", "") == "text" else f"[{getattr(part, 'type', 'content')} left out]"


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _list(server: McpServer) -> list[tuple[str, str, dict[str, Any]]]:
    async with AsyncExitStack() as stack:
        session = await open_session(server, stack, sys.stderr)
        tools = (await session.list_tools()).tools
        return [(one.name, one.description or "", _either(one, "input_schema", "inputSchema")) for one in tools]


def _server_from(fields: dict[str, Any]) -> McpServer:
    pairs = {name: tuple((key, value) for key, value in fields[name]) for name in ("headers", "env")}
    return McpServer(fields["name"], fields["url"], tuple(fields["command"]), **pairs)


if __name__ == "__main__":
    try:
        print(json.dumps(asyncio.run(_list(_server_from(json.load(sys.stdin))))))
    except BaseException as error:
        sys.exit(_first_cause(error))
