"""A worker process of tools: it was forked with the tools in it, and runs one call after the other.

It is sent (tool, method, conversation, arguments), and answers ("gave", value), or (kind of error, words). What a tool
prints goes to the trainer as ("print", line), because a forked console has no terminal of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import sys
from collections.abc import Hashable, Mapping
from typing import Any

from posttrain.conversations.tools.base import Tool, ToolAnswer, ToolFault, describe_error
from posttrain.machines.channel import Channel
from posttrain.texts import well_formed

MOST_LINES, _MOST_CHARS = 20, 2000  # that one call may print


def enter_worker(channel: Channel) -> PrintedLines:
    """Makes this forked process a worker: what it prints goes to the trainer."""
    lines = PrintedLines(channel)
    sys.stdout = sys.stderr = lines
    sys.stdin = open(os.devnull)  # noqa: SIM115
    random.seed()  # workers are forked from one state: their random numbers would be the same
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:  # the threads of its OpenMP pool do not survive a fork, and would be waited for
        sys.modules["torch"].set_num_threads(1)
    return lines


def serve_calls(channel: Channel, tools: Mapping[str, Tool]) -> None:
    """Answers until the trainer closes the channel."""
    lines, loop, process = enter_worker(channel), asyncio.new_event_loop(), os.getpid()
    asyncio.set_event_loop(loop)
    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while not channel.ended:
            for name, method, conversation, given in channel.receive():
                lines.left = MOST_LINES
                answer = loop.run_until_complete(_answer(tools[name], method, conversation, given))
                if os.getpid() != process:  # the tool forked, and this is its child, which came back too
                    os._exit(0)
                lines.flush_line()
                _send(channel, answer)


def _send(channel: Channel, answer: tuple[str, Any]) -> None:
    try:
        channel.send(answer)
    except OSError:
        raise
    except Exception as error:  # metrics that cannot be pickled
        channel.send(("raised", f"its answer cannot be sent: {describe_error(error)}"))


async def _answer(tool: Tool, method: str, conversation: Hashable, given: Any) -> tuple[str, Any]:
    opened = method != "once"
    try:
        if method == "shutdown":
            return "gave", tool.shutdown()
        if method == "once":  # of a tool that keeps nothing: all that belongs to its conversation comes with the call
            row, given = given
            await tool.open(conversation, **(row or {}))
            opened, method = True, "call"
        said = await invoke(tool, method, conversation, given)
        if isinstance(said, ToolAnswer):  # of this class alone: the trainer may not know a tool's own
            return "gave", ToolAnswer(said.text, said.error, said.reward, said.metrics, said.seconds, said.cost)
        if method == "call" and not isinstance(said, str):
            return "raised", f"it gave a {type(said).__name__}, no text"
        return "gave", said
    except ToolFault as error:
        return "said", well_formed(str(error))
    except BaseException as error:  # exit() in a tool ends its call, not its worker
        return "raised" if opened else "open", well_formed(describe_error(own_error(error)))


async def invoke(tool: Tool, method: str, conversation: Hashable, given: Mapping[str, Any] | None) -> Any:
    """Calls a method of a tool."""
    if method == "open":
        return await tool.open(conversation, **(given or {}))
    if method == "call":
        return await tool.call(conversation, dict(given or {}))
    return await getattr(tool, method)(conversation)


def own_error(error: BaseException) -> Exception:
    """What a tool raised, if it is not to be taken for a deadline or an end of ours."""
    if isinstance(error, TimeoutError):
        return RuntimeError(str(error) or "it waited too long for something")
    error = error.__cause__ if isinstance(error.__cause__, StopIteration) else error  # as a coroutine raises it
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised {type(error).__name__}")  # exit() in a tool ends its call, not the run


class PrintedLines(io.TextIOBase):
    """Stands for stdout and stderr."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._rest, self.left = channel, "", MOST_LINES

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._rest = (self._rest + text[:_MOST_CHARS]).split("\n")
        for line in lines:
            self._send(line)
        return len(text)

    def flush_line(self) -> None:
        if self._rest:
            self._send(self._rest)
            self._rest = ""

    def _send(self, line: str) -> None:
        self.left -= 1
        if self.left >= 0:
            self._channel.send(("print", well_formed(line[:_MOST_CHARS])))
