"""`minimax_m3`: what MiniMax-M3 writes: every tag behind a mark, nested values as nested tags.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="search">]<]minimax[>[<query>...]<]minimax[>[</query>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, read_call
from posttrain.conversations.tools.base import ToolCall

_MARK = "]<]minimax[>["
_NAME = re.compile(r'\s*name="?([^">\n]{1,200})"?>')
_TAG = re.compile(re.escape(_MARK) + r"<(/?)([^<>\n]{1,200})>")


class MinimaxM3(CallFormat):
    """Values are texts; the tool's schema says what type they have. A list has tags named `item`."""

    models = "MiniMax-M3"
    opening = f"{_MARK}<tool_call>"
    closing = f"{_MARK}</tool_call>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, f"{_MARK}<invoke", f"{_MARK}</invoke>")]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        given = _parse(inner[found.end() :]) if found else None
        if found is None or given is None:
            return self.explain()
        return read_call({"name": found[1], "arguments": given}, "arguments")

    def write(self, call: ToolCall) -> str:
        given = "".join(_write(key, value) for key, value in call.arguments.items())
        return f'{self.opening}\n{_MARK}<invoke name="{call.name}">{given}{_MARK}</invoke>\n{self.closing}'


FORMATS.add("minimax_m3", MinimaxM3())


def _parse(text: str) -> dict[str, Any] | None:
    """The arguments; None if tags do not match. Without recursion: a model may nest them as deep as it likes."""
    stack, place = [("", list[tuple[str, Any]]())], 0
    for tag in _TAG.finditer(text):
        closes, name = tag.groups()
        if not closes:
            stack.append((name, []))
        else:
            opened, members = stack.pop()
            if not stack or name != opened:
                return None
            stack[-1][1].append((name, _value(members, text[place : tag.start()])))
        place = tag.end()
    return dict(stack[0][1]) if len(stack) == 1 else None


def _value(members: list[tuple[str, Any]], text: str) -> Any:
    if not members:
        return text
    return [one for _, one in members] if all(name == "item" for name, _ in members) else dict(members)


def _write(key: str, value: Any) -> str:
    match value:
        case str():
            inner = value
        case dict():
            inner = "".join(_write(name, one) for name, one in value.items())
        case list():
            inner = "".join(_write("item", one) for one in value)
        case _:
            inner = json.dumps(value)
    return f"{_MARK}<{key}>{inner}{_MARK}</{key}>"
