"""`deepseek_v32`: what DeepSeek-V3.2 and V4 write. V3.2 calls the outer block `function_calls`, V4 `tool_calls`.

<｜DSML｜function_calls>
<｜DSML｜invoke name="search">
<｜DSML｜parameter name="query" string="true">...</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import json
import re
from typing import Any

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, read_call, write_value
from posttrain.conversations.tools.base import ToolCall

_NAME = re.compile(r'\s*name="([^"\n]{1,200})"\s*>')
_PARAMETER = re.compile(
    r'<｜DSML｜parameter name="([^"\n]{1,200})"(?: string="(true|false)")?>(.*?)'
    r"(?:</｜DSML｜parameter>|(?=<｜DSML｜parameter )|\Z)",
    re.DOTALL,
)
_BLOCK_END = re.compile(r"</｜DSML｜(?:function|tool)_calls>")


class DeepseekV32(CallFormat):
    """`string` says whether an argument is a text or JSON."""

    models = "DeepSeek-V3.2, V4"
    opening = "<｜DSML｜"
    closing = "</｜DSML｜function_calls>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<｜DSML｜invoke", "</｜DSML｜invoke>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        if found is None:
            return self.explain()
        try:
            given = {key: _value(text, kind) for key, kind, text in _PARAMETER.findall(inner, found.end())}
        except (ValueError, RecursionError):
            return self.explain()
        return read_call({"name": found[1], "arguments": given}, "arguments")

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{write_value(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in call.arguments.items()
        )
        invoke = f'<｜DSML｜invoke name="{call.name}">\n{given}</｜DSML｜invoke>\n'
        return f"<｜DSML｜function_calls>\n{invoke}{self.closing}"

    def turn_end(self, rendered: str) -> int:
        return [found.end() for found in _BLOCK_END.finditer(rendered)][-1]


FORMATS.add("deepseek_v32", DeepseekV32())


def _value(text: str, is_text: str) -> Any:
    return json.loads(text) if is_text == "false" else text
