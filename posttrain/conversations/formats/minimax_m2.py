"""`minimax_m2`: what MiniMax-M2 writes.

<minimax:tool_call>
<invoke name="search">
<parameter name="query">...</parameter>
</invoke>
</minimax:tool_call>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

_INVOKE = re.compile(r'<invoke name="?([^">\n]{1,200})"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_PARAMETER = re.compile(
    r'<parameter name="?([^">\n]{1,200})"?>(.*?)(?:</parameter>|(?=<parameter name=)|\Z)', re.DOTALL
)


class MinimaxM2(CallFormat):
    """One block has all calls of a turn. Arguments are texts; the tool's schema says what type they have."""

    models = "MiniMax-M2, M2.1, M2.5"
    opening = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        calls = list[ToolCall | Unreadable]()
        for block in find_blocks(text, "<minimax:tool_call>", self.closing):
            found = [ToolCall(name, dict(_PARAMETER.findall(inner))) for name, inner in _INVOKE.findall(block)]
            calls += found or [self.explain()]
        return calls

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f'<parameter name="{key}">{write_value(value)}</parameter>\n' for key, value in call.arguments.items()
        )
        return f'<minimax:tool_call>\n<invoke name="{call.name}">\n{given}</invoke>\n</minimax:tool_call>'


FORMATS.add("minimax_m2", MinimaxM2())
