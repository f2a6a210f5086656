"""`llama3_json`: what Llama 3.1 and later write: a turn that is nothing but calls, separated by `;`.

{"name": "search", "parameters": {"query": "..."}}
"""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import (
    FORMATS,
    CallFormat,
    Unreadable,
    no_object,
    read_call,
    skip_thinking,
    write_call,
)
from posttrain.conversations.tools.base import ToolCall

_PYTHON_TAG, _CALL = "<|python_tag|>", re.compile(r'\{\s*"name"\s*:')
_DECODER, _SEPARATOR = json.JSONDecoder(), re.compile(r"[; \n]*")


class Llama3Json(CallFormat):
    """Calls at the beginning of a turn. JSON without a name and parameters is an answer, not a call."""

    models = "Llama 3.1, 3.2, 3.3"
    closing = "}"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        text = skip_thinking(text)
        tagged, turn = _PYTHON_TAG in text, (text.partition(_PYTHON_TAG)[2] or text).strip()
        meant = tagged or _CALL.match(turn) is not None
        calls, place = list[ToolCall | Unreadable](), 0
        while turn.startswith("{", place):  # a place in the text: copies of the rest would take quadratic time
            try:
                found, place = _DECODER.raw_decode(turn, place)
            except (ValueError, RecursionError):
                return [*calls, no_object("parameters")] if meant else calls
            if not tagged and not ({"name"} < found.keys() and found.keys() & {"parameters", "arguments"}):
                return calls
            calls.append(read_call(found, "arguments" if "parameters" not in found else "parameters"))
            place = _SEPARATOR.match(turn, place).end()  # pyright: ignore (it always matches)
        return calls or ([no_object("parameters")] if tagged else [])

    def write(self, call: ToolCall) -> str:
        return write_call(call, "parameters")


FORMATS.add("llama3_json", Llama3Json())
