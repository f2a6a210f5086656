"""`solar_open`: a call is its id, its name and its arguments as a JSON object, each behind a mark."""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.formats.json_arguments import JsonArguments
from posttrain.conversations.tools.base import ToolCall


class SolarOpen(JsonArguments):
    """Thinking, words and calls are messages of one turn.

    <|think|>...<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>search<|tool_call:args|>
    {"query": "..."}<|tool_call:end|>
    """

    models = "Solar Open"
    opening = "<|tool_calls|>"
    closing = "<|tool_call:end|>"
    streams = False
    block = ("<|tool_call:begin|>", "<|tool_call:end|>")
    word_marks = re.compile(r"<\|end\|>|(?:<\|begin\|>assistant)?<\|content\|>|<\|begin\|>assistant")

    def take_apart(self, inner: str) -> tuple[str, str]:
        name, _, arguments = inner.partition("<|tool_call:name|>")[2].partition("<|tool_call:args|>")
        return name, arguments

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"{self.call_id(call.name, 0)}<|tool_call:name|>{call.name}<|tool_call:args|>{arguments}"
        return f"{self.opening}<|tool_call:begin|>{inner}{self.closing}"


FORMATS.add("solar_open", SolarOpen())
