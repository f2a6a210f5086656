"""`seed_oss`: what Seed-OSS writes.

<seed:tool_call>
<function=search>
<parameter=query>...</parameter>
</function>
</seed:tool_call>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class SeedOss(CallFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    models = "Seed-OSS"
    opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, self.opening, self.closing)]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _FUNCTION.match(inner)
        return self.explain() if found is None else ToolCall(found[1].strip(), dict(_PARAMETER.findall(found[2])))

    def write(self, call: ToolCall) -> str:
        given = "".join(f"<parameter={key}>{write_value(value)}</parameter>\n" for key, value in call.arguments.items())
        return f"{self.opening}\n<function={call.name}>\n{given}</function>\n{self.closing}"


FORMATS.add("seed_oss", SeedOss())
