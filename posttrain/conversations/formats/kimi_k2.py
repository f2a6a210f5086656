"""`kimi_k2`: what Kimi K2 writes. The name stands in the call's id, with its number in the conversation.

<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "..."}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import json

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks
from posttrain.conversations.tools.base import ToolCall


class KimiK2(CallFormat):
    """Calls with the id `functions.NAME:NUMBER`."""

    models = "Kimi K2"
    opening = "<|tool_calls_section_begin|>"
    closing = "<|tool_calls_section_end|>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        call_id, _, arguments = inner.partition("<|tool_call_argument_begin|>")
        name, colon, number = call_id.strip().removeprefix("functions.").rpartition(":")
        return self.read_json(name if colon and number.isdigit() else call_id.strip(), arguments)

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"<|tool_call_begin|>{self.call_id(call.name, 0)}<|tool_call_argument_begin|>{arguments}"
        return f"<|tool_calls_section_begin|>{inner}<|tool_call_end|><|tool_calls_section_end|>"

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"


FORMATS.add("kimi_k2", KimiK2())
