"""`deepseek_v3`: what DeepSeek-V3, R1 and V3.1 write, between special tokens of their own.

V3.1:    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "..."}<｜tool▁call▁end｜> ...
V3, R1:  ... <｜tool▁call▁begin｜>function<｜tool▁sep｜>search, and the arguments in a fenced block of JSON
"""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks
from posttrain.conversations.tools.base import ToolCall

_FENCED = re.compile(r"\s*+([^\n`]{1,200})\n?```(?:json)?(.*?)(?:```|\Z)", re.DOTALL)


class DeepseekV3(CallFormat):
    """Reads both forms, and writes the newer one."""

    models = "DeepSeek-V3, R1, V3.1"
    opening = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        name, _, rest = inner.partition("<｜tool▁sep｜>")
        if name.strip() == "function" and (fenced := _FENCED.match(rest)):
            name, rest = fenced[1], fenced[2]
        return self.read_json(name, rest)

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


FORMATS.add("deepseek_v3", DeepseekV3())
