"""Tools of an MCP server: `actor_rollout_ref.rollout.tools=["mcp:python server.py"]`, or `["mcp:http://127.0.0.1:8000/mcp"]`.

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
from collections.abc import Hashable
from contextlib import AsyncExitStack
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolFault
from posttrain.errors import UserError

PREFIX = "mcp:"
_START_S = 60.0


class McpTool(Tool):
    """One tool of a server. Nothing is kept between calls but the session."""

    stateless = True
    at_once = 8

    def __init__(self, server: str, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name, self.server = name, server
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


def read_mcp_tools(name: str) -> list[McpTool]:
    """The tools of a server, by what a run names it; UserError if it cannot be had."""
    server = name.removeprefix(PREFIX).strip()
    if importlib.util.find_spec("mcp") is None:
        raise UserError(f"the tools {name} need the package mcp.\n  to do:  pip install 'posttrain[mcp]'")
    try:
        made = subprocess.run(
            [sys.executable, "-m", "posttrain.conversations.tools.mcp", server],
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
        listed = json.loads(made.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise UserError(f"the MCP server {server} did not list its tools within {_START_S:g} seconds.") from None
    except (IndexError, ValueError):
        last = (made.stderr.strip().splitlines() or ["it gave no answer"])[-1].strip(" |+-")
        raise UserError(
            f"the MCP server {server} cannot be reached: {last}.\n"
            "  to do:  give the command that starts it (mcp:python server.py), or its address (mcp:http://HOST:PORT/mcp)"
        ) from None
    if not listed:
        raise UserError(f"the MCP server {server} has no tools.")
    return [McpTool(server, *one) for one in listed]


class _Session:
    """A session with a server, held open by a task of its own: MCP's clients must end where they began."""

    opened: dict[str, asyncio.Future[_Session]] = {}  # noqa: RUF012

    def __init__(self, client: Any) -> None:
        self.client = client

    @classmethod
    async def of(cls, server: str) -> _Session:
        if server not in cls.opened:
            cls.opened[server] = asyncio.get_running_loop().create_future()
            cls._task = asyncio.create_task(cls._hold(server, cls.opened[server]))
        return await cls.opened[server]

    @classmethod
    def drop(cls, server: str) -> None:
        cls.opened.pop(server, None)

    @classmethod
    async def _hold(cls, server: str, opened: asyncio.Future[_Session]) -> None:
        try:
            async with AsyncExitStack() as stack:
                opened.set_result(cls(await open_session(server, stack)))
                await asyncio.Event().wait()
        except BaseException as error:
            cls.drop(server)
            if not opened.done():
                words = _first_cause(error)
                opened.set_exception(RuntimeError(f"the MCP server cannot be reached: {words}"))


async def open_session(server: str, stack: AsyncExitStack) -> Any:
    """An initialised client session, which lives as long as `stack`."""
    from mcp import ClientSession, StdioServerParameters  # pyright: ignore

    if server.startswith(("http://", "https://")):
        from mcp.client import streamable_http  # pyright: ignore

        connect = _either(streamable_http, "streamable_http_client", "streamablehttp_client")
        read, write, *_ = await stack.enter_async_context(connect(server))
    else:
        from mcp.client.stdio import stdio_client  # pyright: ignore

        command, *arguments = shlex.split(server)
        parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        # A forked worker's stderr is no file, and a server wants one.
        read, write = await stack.enter_async_context(stdio_client(parameters, errlog=stack.enter_context(_devnull())))
    session = await stack.enter_async_context(ClientSession(read, write))
    await session.initialize()
    return session


def _devnull() -> Any:
    return open(os.devnull, "w")


def _either(thing: Any, new: str, old: str) -> Any:
    """An attribute by its name in mcp 2.x, or in 1.x."""
    return getattr(thing, new) if hasattr(thing, new) else getattr(thing, old)


def _text(part: Any) -> str:
    return part.text if getattr(part, "type", "") == "text" else f"[{getattr(part, 'type', 'content')} left out]"


def _first_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


async def _list(server: str) -> list[tuple[str, str, dict[str, Any]]]:
    async with AsyncExitStack() as stack:
        session = await open_session(server, stack)
        tools = (await session.list_tools()).tools
        return [(one.name, one.description or "", _either(one, "input_schema", "inputSchema")) for one in tools]


if __name__ == "__main__":
    try:
        print(json.dumps(asyncio.run(_list(sys.argv[1]))))
    except BaseException as error:
        sys.exit(_first_cause(error))
