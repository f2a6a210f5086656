"""`hermes`: what Qwen2.5, Qwen3, Hermes and many others write.

<tool_call>
{"name": "search", "arguments": {"query": "..."}}
</tool_call>
"""

from __future__ import annotations

import json

from posttrain.conversations.formats.base import (
    FORMATS,
    CallFormat,
    Unreadable,
    find_blocks,
    no_object,
    read_call,
    write_call,
)
from posttrain.conversations.tools.base import ToolCall


class Hermes(CallFormat):
    """Calls in tags, anywhere in a turn; a call without its closing tag is read as far as it goes."""

    models = "Qwen2.5, Qwen3, Hermes, SmolLM3"
    opening = "<tool_call>"
    closing = "</tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [_read(inner) for inner in find_blocks(text, "<tool_call>", self.closing)]

    def write(self, call: ToolCall) -> str:
        return f"<tool_call>\n{write_call(call, 'arguments')}\n</tool_call>"


FORMATS.add("hermes", Hermes())


def _read(text: str) -> ToolCall | Unreadable:
    try:
        return read_call(json.loads(text), "arguments")
    except (ValueError, RecursionError):
        return no_object("arguments")
