"""Formats of Functionary: a name, then its arguments as a JSON object."""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, read_call, skip_thinking
from posttrain.conversations.formats.json_arguments import JsonArguments
from posttrain.conversations.tools.base import ToolCall

_DECODER = json.JSONDecoder()


class Functionary31(JsonArguments):
    """<function=search>{"query": "..."}</function>

    It writes calls of its code interpreter as code behind <|python_tag|>. That is no call of a tool with arguments.
    """

    models = "Functionary v3.1"
    opening = "<function="
    closing = "</function>"
    _code = "<|python_tag|>"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        return super().read(text) or ([self.explain()] if self._code in skip_thinking(text) else [])

    def take_apart(self, inner: str) -> tuple[str, str]:
        name, _, arguments = inner.partition(">")
        return name, arguments

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}{call.name}>{json.dumps(call.arguments, ensure_ascii=False)}{self.closing}"

    def turn_end(self, rendered: str) -> int:
        # The template writes a call of a tool with the name `python` behind the tag of code, without a closing mark.
        mark = self.closing if self.closing in rendered else "}"
        return rendered.rindex(mark) + len(mark)


FORMATS.add("functionary_v31", Functionary31())


class Functionary32(CallFormat):
    """A turn is pieces with a recipient; `all` is the user. The prompt has the mark of the first one.

    all
    Let me see.>>>search
    {"query": "..."}
    """

    models = "Functionary v3.2"
    streams = False
    closing = "}"
    word_marks = re.compile(r"(?:\A\s*+|>>>)all\n")
    _header = re.compile(r"(?:\A\s*+(?=[\w.-]{1,200}\n\s*+\{)|>>>)([\w.-]{1,200})\n\s*+")

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        text, calls, place = skip_thinking(text), list[ToolCall | Unreadable](), 0
        while found := self._header.search(text, place):
            place = found.end()
            if found[1] == "all":
                continue
            try:
                arguments, place = _DECODER.raw_decode(text, place)
                calls.append(read_call({"name": found[1], "arguments": arguments}, "arguments"))
            except (ValueError, RecursionError):
                return [*calls, self.explain()]
        return calls

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        thinking, words = super().split(text, has_calls=False)
        found = self._header.search(words) if has_calls else None
        return thinking, words[: found.start()].rstrip() if found else words

    def write(self, call: ToolCall) -> str:
        return f">>>{call.name}\n{json.dumps(call.arguments, ensure_ascii=False)}"


FORMATS.add("functionary_v32", Functionary32())
