"""Formats in which a call is a JSON object with its name behind a mark of its own, or in a list between two marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.formats.base import FORMATS, BlockFormat, Unreadable, read_call, write_call
from posttrain.conversations.formats.json_objects import JsonList
from posttrain.conversations.tools.base import ToolCall

_DECODER, _BLANKS = json.JSONDecoder(), re.compile(r"\s*")


class MarkedObjects(BlockFormat):
    """Each call is an object behind a mark. What a turn ends with stands behind the last object."""

    closing = "}"

    def __init__(self, models: str, opening: str, blank: str) -> None:
        """blank: what stands between the mark and the object."""
        self.models, self.opening, self.blank = models, opening, blank
        self.block = (opening, None)

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        place = 0
        while place >= 0:
            begin = _BLANKS.match(inner, place).end()  # pyright: ignore (it always matches)
            try:
                value, place = _DECODER.raw_decode(inner, begin)
            except (ValueError, RecursionError):
                yield self.explain()
                return
            yield read_call(value, "arguments")
            found = inner.find(self.opening, place)
            place = found + len(self.opening) if found >= 0 else -1

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}{self.blank}{write_call(call, 'arguments')}"


# <function_call> {"name": "search", "arguments": {"query": "..."}}
FORMATS.add("granite_20b_fc", MarkedObjects("Granite 20B function calling", "<function_call>", " "))


class GigaChat3(MarkedObjects):
    """A call is a message to a function: function call<|role_sep|>
    {"name": "search", "arguments": {"query": "..."}}"""

    word_marks = re.compile(r"<\|message_sep\|>\s*")


FORMATS.add("gigachat3", GigaChat3("GigaChat 3", "function call<|role_sep|>", "\n"))
# <|function_call|>{"name": "search", "arguments": {"query": "..."}}
FORMATS.add("gigachat31", MarkedObjects("GigaChat 3.1", "<|function_call|>", ""))


class InternLm2(BlockFormat):
    """The second mark says whom an action is for: <|plugin|> is a tool, <|interpreter|> runs code, which is no call.

    <|action_start|><|plugin|>
    {"name": "search", "parameters": {"query": "..."}}<|action_end|>
    """

    models = "InternLM2, InternLM2.5"
    opening = "<|action_start|>"
    closing = "<|action_end|>"
    _plugin = "<|plugin|>"

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        try:
            found = json.loads(inner.strip().removeprefix(self._plugin))
            # The models write `parameters`; vLLM's chat template writes `arguments`.
            key = "arguments" if isinstance(found, dict) and "parameters" not in found else "parameters"
            yield read_call(found, key)
        except (ValueError, RecursionError):
            yield self.explain()

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}{self._plugin}\n{write_call(call, 'parameters')}{self.closing}"


FORMATS.add("internlm2", InternLm2())


class Cohere(JsonList):
    """The name is `tool_name`, and each call has a number in the conversation. Thinking and answers have marks, too.

    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "search", "parameters": {"query": "..."}}]<|END_ACTION|>
    """

    word_marks = re.compile(r"<\|(?:START|END)_(?:RESPONSE|TEXT)\|>")

    def read_one(self, value: Any) -> ToolCall | Unreadable:
        if not isinstance(value, dict) or "tool_name" not in value:
            return self.explain()
        return read_call({"name": value["tool_name"], "parameters": value.get("parameters", {})}, "parameters")

    def write_one(self, call: ToolCall) -> str:
        written = {"tool_call_id": "0", "tool_name": call.name, "parameters": call.arguments}
        return f"\n    {json.dumps(written, ensure_ascii=False)}\n"


FORMATS.add("cohere", Cohere("Command R7B, Command A", "<|START_ACTION|>", "<|END_ACTION|>"))
