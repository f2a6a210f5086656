"""`muse_glimmer`: what Muse Glimmer writes. Each call is a message to a function; thinking is a message to itself.

<|start|>assistant to=search<|message|><atem:function_calls>
<atem:invoke name="search">
<atem:parameter name="query">...</atem:parameter>
</atem:invoke>
</atem:function_calls><|eot|>
"""

from __future__ import annotations

import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, write_value
from posttrain.conversations.tools.base import ToolCall

_NAME = re.compile(r'\s*name="?([^">\n]{1,200})"?>')
_PARAMETER = re.compile(
    r'<atem:parameter name="?([^">\n]{1,200})"?>(.*?)(?:</atem:parameter>|(?=<atem:parameter )|\Z)', re.DOTALL
)
_TO_ITSELF = re.compile(r"\bto=self\b")
_END = re.compile(r"<\|(?:eom|eot)\|>")


class MuseGlimmer(CallFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    models = "Muse Glimmer"
    streams = False
    opening = "<atem:function_calls>"
    closing = "</atem:function_calls>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        calls = list[ToolCall | Unreadable]()
        for header, body in _messages(text):
            if not _TO_ITSELF.search(header):
                calls += [self._read(one) for one in find_blocks(body, "<atem:invoke", "</atem:invoke>")]
        return calls

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        return self.explain() if found is None else ToolCall(found[1], dict(_PARAMETER.findall(inner, found.end())))

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        bodies: dict[bool, list[str]] = {True: [], False: []}
        for header, body in _messages(text):
            bodies[_TO_ITSELF.search(header) is not None].append(body.partition(self.opening)[0] if has_calls else body)
        return "\n".join(bodies[True]), "".join(bodies[False])

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f'<atem:parameter name="{key}">{write_value(value)}</atem:parameter>\n'
            for key, value in call.arguments.items()
        )
        invoke = f'<atem:invoke name="{call.name}">\n{given}</atem:invoke>\n'
        return f" to={call.name}<|message|>{self.opening}\n{invoke}{self.closing}"


FORMATS.add("muse_glimmer", MuseGlimmer())


def _messages(text: str) -> list[tuple[str, str]]:
    """(header, body) of each message of a turn. One without a header is a body."""
    found = list[tuple[str, str]]()
    for message in text.split("<|start|>"):
        header, has_body, body = message.partition("<|message|>")
        found.append((header, _END.split(body, maxsplit=1)[0]) if has_body else ("", header))
    return found
