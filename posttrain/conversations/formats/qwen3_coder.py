"""`qwen3_coder`: what Qwen3-Coder, Qwen3.5 and Nemotron 3 write: a tag for the function and one for each argument.

<tool_call>
<function=search>
<parameter=query>
...
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

# Names have at most 200 characters: a search for `>` without a bound takes quadratic time on a row of open tags.
_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Qwen3Coder(CallFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    models = "Qwen3-Coder, Qwen3.5, Nemotron 3"
    opening = "<tool_call>"
    closing = "</tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<tool_call>", self.closing)]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _FUNCTION.match(inner)
        return self.explain() if found is None else ToolCall(found[1].strip(), dict(_PARAMETER.findall(found[2])))

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f"<parameter={key}>\n{write_value(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        return f"<tool_call>\n<function={call.name}>\n{given}</function>\n</tool_call>"


FORMATS.add("qwen3_coder", Qwen3Coder())
