"""`kimi_k3`: what Kimi K3 writes: tags between special tokens, with the type of each argument.

<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" type="string"<|sep|>...
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, read_call, write_value
from posttrain.conversations.tools.base import ToolCall

_NAME = re.compile(r'\s*tool="([^"\n]{1,200})"[^<\n]{0,40}<\|sep\|>')
_ARGUMENT = re.compile(
    r'<\|open\|>(?:argument key="([^"\n]{0,200})"|(json)) type="([a-z]{1,10})"<\|sep\|>(.*?)'
    r"(?:<\|close\|>(?:argument|json)<\|sep\|>|\Z)",
    re.DOTALL,
)
_TYPES = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number", list: "array"}
_TAG = re.compile(r"<\|(?:open|close)\|>(?:response|message)[^<\n]{0,40}<\|sep\|>|<\|end_of_msg\|>")


class KimiK3(CallFormat):
    """An argument is JSON unless its type is `string`."""

    models = "Kimi K3"
    opening = "<|open|>tools<|sep|>"
    closing = "<|close|>tools<|sep|>"
    streams = False

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, "<|open|>call ", "<|close|>call<|sep|>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        if found is None:
            return self.explain()
        given = dict[str, Any]()
        try:
            for key, is_object, kind, text in _ARGUMENT.findall(inner, found.end()):
                value = text if kind == "string" else json.loads(text)
                given |= value if is_object and isinstance(value, dict) else {html.unescape(key): value}
        except (ValueError, RecursionError):
            return self.explain()
        return read_call({"name": html.unescape(found[1]), "arguments": given}, "arguments")

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        thinking, words = super().split(text, has_calls=has_calls)
        return thinking, _TAG.sub("", words)

    def write(self, call: ToolCall) -> str:
        given = "".join(
            f'<|open|>argument key="{_escaped(key)}" type="{_TYPES.get(type(value), "object")}"<|sep|>'
            f"{write_value(value)}<|close|>argument<|sep|>"
            for key, value in call.arguments.items()
        )
        inner = f'<|open|>call tool="{_escaped(call.name)}" index="1"<|sep|>{given}<|close|>call<|sep|>'
        return f"{self.opening}{inner}{self.closing}"


FORMATS.add("kimi_k3", KimiK3())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")
