"""`mistral`: what Mistral's models write.

up to tokenizer v7:  [TOOL_CALLS][{"name": "search", "arguments": {"query": "..."}, "id": "..."}]
from v11 on:         [TOOL_CALLS]search[ARGS]{"query": "..."}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, find_blocks, read_call
from posttrain.conversations.tools.base import ToolCall

_MARK, _DECODER = "[TOOL_CALLS]", json.JSONDecoder()
# `*+` does not backtrack: thousands of blanks would take quadratic time.
_BEGIN = re.compile(r"\s*+(?:\[TOOL_CALLS\]\s*+)?+(?=[\[{])")
_NAMED = re.compile(
    r"\s*+(?:\[TOOL_CALLS\])?+([^\s\[\]{}]{1,200})(?:\[CALL_ID\][^\[\]]{0,200})?(?:\[ARGS\])?\s*+(?=\{)"
)


class Mistral(CallFormat):
    """Reads both forms, and writes the newer one. Everything behind the first mark is a call."""

    models = "Mistral 7B v0.3, Nemo, Small, Large, Ministral, Magistral"
    opening = "[TOOL_CALLS]"
    closing = "}"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return [call for block in find_blocks(text, _MARK, None) for call in self._read(block)]

    def _read(self, block: str) -> Iterator[ToolCall | Unreadable]:
        place = 0
        while found := _NAMED.match(block, place) or _BEGIN.match(block, place):
            try:
                value, place = _DECODER.raw_decode(block, found.end())
            except (ValueError, RecursionError):
                yield self.explain()
                return
            if found.re is _NAMED:
                yield read_call({"name": found[1], "arguments": value}, "arguments")
            else:
                yield from (read_call(one, "arguments") for one in (value if isinstance(value, list) else [value]))
        if not place:
            yield self.explain()

    def write(self, call: ToolCall) -> str:
        return f"{_MARK}{call.name}[ARGS]{json.dumps(call.arguments, ensure_ascii=False)}"

    def turn_end(self, rendered: str) -> int:
        # A list of calls ends with a bracket, a call of the newer form with a brace.
        return max(rendered.rfind("]"), rendered.rfind("}")) + 1


FORMATS.add("mistral", Mistral())
