"""`gemma4`: what Gemma 4 writes: keys without quotes, texts between `<|"|>`. A result continues the model's turn.

<|tool_call>call:search{query:<|"|>...<|"|>,limit:3}<tool_call|>
"""

from __future__ import annotations

import json
import re
from typing import Any

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks
from posttrain.conversations.tools.base import ToolCall

_QUOTE = '<|"|>'
_NAME = re.compile(r"\s*call:([^\s{}<>]{1,200})(?=\{)")
_WORD = re.compile(r"[^\s{}\[\],:\"]{1,200}")


class Gemma4(CallFormat):
    """The braces hold JSON, but for the quotes."""

    models = "Gemma 4"
    opening = "<|tool_call>"
    closing = "<tool_call|>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [self._read(inner) for inner in find_blocks(text, self.opening, self.closing)]

    def _read(self, inner: str) -> ToolCall | Unreadable:
        found = _NAME.match(inner)
        return self.explain() if found is None else self.read_json(found[1], _as_json(inner[found.end() :]))

    def write(self, call: ToolCall) -> str:
        given = ",".join(f"{key}:{_write(value)}" for key, value in call.arguments.items())
        return f"{self.opening}call:{call.name}{{{given}}}{self.closing}"


FORMATS.add("gemma4", Gemma4())


def _as_json(text: str) -> str:
    """The same object as JSON. Every second piece between the quotes is a text."""
    pieces = text.split(_QUOTE)
    return "".join(json.dumps(piece) if at % 2 else _WORD.sub(_quoted, piece) for at, piece in enumerate(pieces))


def _quoted(word: re.Match[str]) -> str:
    """Keys are words before a colon."""
    if word.string.startswith(":", word.end()):
        return json.dumps(word[0])
    return "null" if word[0] == "None" else word[0]  # as the chat template writes it


def _write(value: Any) -> str:
    match value:
        case str():
            return f"{_QUOTE}{value}{_QUOTE}"
        case dict():
            return "{" + ",".join(f"{key}:{_write(one)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_write, value)) + "]"
    return json.dumps(value)
