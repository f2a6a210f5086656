"""`glm`: what GLM 4.5 and later write: the name, then a key and a value for each argument.

<tool_call>search
<arg_key>query</arg_key>
<arg_value>...</arg_value>
</tool_call>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

_NAME = re.compile(r"\s*([^\s<>{}]{1,200})\s*(?=<arg_key>|\Z)")
_ARGUMENT = re.compile(
    r"<arg_key>(.{1,200}?)</arg_key>\s{0,20}<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", re.DOTALL
)


class Glm(CallFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    models = "GLM 4.5, 4.6, 4.7"
    opening = "<tool_call>"
    closing = "</tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<tool_call>", self.closing)]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        # A model that samples <|observation|> or <|user|> without closing its call has that token in the last block.
        inner = re.split(r"<\|[a-z]{1,20}\|>", inner, maxsplit=1)[0]
        found = _NAME.match(inner)
        if found is None:
            return self.explain()
        return ToolCall(found[1], {key.strip(): value for key, value in _ARGUMENT.findall(inner, found.end())})

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{write_value(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{given}</tool_call>"


FORMATS.add("glm", Glm())
