"""`hy3`: what Hunyuan Hy3 writes. Its tags carry a suffix.

<tool_calls:opensource>
<tool_call:opensource>search<tool_sep:opensource>
<arg_key:opensource>query</arg_key:opensource>
<arg_value:opensource>...</arg_value:opensource>
</tool_call:opensource>
</tool_calls:opensource>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

_NAME = re.compile(r"\s*([^\s<>{}]{1,200})\s*<tool_sep:opensource>")
_ARGUMENT = re.compile(
    r"<arg_key:opensource>(.{1,200}?)</arg_key:opensource>\s{0,20}<arg_value:opensource>(.*?)"
    r"(?:</arg_value:opensource>|(?=<arg_key:opensource>)|\Z)",
    re.DOTALL,
)


class Hy3(CallFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    models = "Hunyuan Hy3"
    opening = "<tool_calls:opensource>"
    closing = "</tool_calls:opensource>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<tool_call:opensource>", "</tool_call:opensource>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        if found is None:
            return self.explain()
        return ToolCall(found[1], {key.strip(): value for key, value in _ARGUMENT.findall(inner, found.end())})

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f"<arg_key:opensource>{key}</arg_key:opensource>\n"
            f"<arg_value:opensource>{write_value(value)}</arg_value:opensource>\n"
            for key, value in call.arguments.items()
        )
        inner = f"<tool_call:opensource>{call.name}<tool_sep:opensource>\n{given}</tool_call:opensource>\n"
        return f"{self.opening}\n{inner}{self.closing}"


FORMATS.add("hy3", Hy3())
