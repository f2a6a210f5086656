"""Formats in which a call is a JSON object with its name: alone, in a list, or several behind each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.formats.base import (
    FORMATS,
    BlockFormat,
    CallFormat,
    Unreadable,
    no_object,
    read_call,
    skip_thinking,
    with_id,
    write_call,
)
from posttrain.conversations.tools.base import ToolCall

_DECODER = json.JSONDecoder()


class TaggedObject(BlockFormat):
    """Calls in tags, anywhere in a turn; a call without its closing tag is read as far as it goes.

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>
    """

    def __init__(self, models: str, opening: str, closing: str) -> None:
        self.models, self.opening, self.closing = models, opening, closing

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        try:
            yield read_call(json.loads(inner), "arguments")
        except (ValueError, RecursionError):
            yield no_object("arguments")

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}\n{write_call(call, 'arguments')}\n{self.closing}"


FORMATS.add("hermes", TaggedObject("Qwen2.5, Qwen3, Hermes, SmolLM3, Reka Edge", "<tool_call>", "</tool_call>"))
FORMATS.add("longcat", TaggedObject("LongCat-Flash", "<longcat_tool_call>", "</longcat_tool_call>"))


class JsonList(BlockFormat):
    """The calls of a turn as a list of JSON objects. Example: `JsonList("Granite 3", "<|tool_call|>", "]")`."""

    def __init__(self, models: str, opening: str, closing: str) -> None:
        """closing: the mark behind the list, or `]` if nothing closes the list but its bracket."""
        self.models, self.opening, self.closing = models, opening, closing
        self.block = (opening, None) if closing == "]" else None
        self._between = re.compile(rf"(?:\s++|{re.escape(opening)})*+")

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        place, found = 0, False
        while inner.startswith(("[", "{"), begin := self._between.match(inner, place).end()):  # pyright: ignore (it matches)
            try:
                value, place = _DECODER.raw_decode(inner, begin)
            except (ValueError, RecursionError):
                yield self.explain()
                return
            found = True
            yield from map(self.read_one, value if isinstance(value, list) else [value])
        if not found:
            yield self.explain()

    def read_one(self, value: Any) -> ToolCall | Unreadable:
        """A call from its object."""
        return read_call(value, "arguments")

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}[{self.write_one(call)}]{self.closing.removeprefix(']')}"

    def write_one(self, call: ToolCall) -> str:
        """The object of a call."""
        return write_call(call, "arguments")


class NamesAsKeys(JsonList):
    """Each object has one key, the call's name: <|tools_prefix|>[{"search": {"query": "..."}}]<|tools_suffix|>"""

    def read_one(self, value: Any) -> ToolCall | Unreadable:
        if not isinstance(value, dict) or len(value) != 1:
            return self.explain()
        ((name, arguments),) = value.items()
        return read_call({"name": name, "arguments": arguments}, "arguments")

    def write_one(self, call: ToolCall) -> str:
        return json.dumps({call.name: call.arguments}, ensure_ascii=False)


# <tool_calls>[{"name": "search", "arguments": {"query": "..."}}]</tool_calls>
FORMATS.add("apriel", JsonList("Apriel, Hunyuan A13B, MiniMax-M1, Jamba", "<tool_calls>", "</tool_calls>"))
FORMATS.add("apertus", NamesAsKeys("Apertus", "<|tools_prefix|>", "<|tools_suffix|>"))
FORMATS.add("granite", JsonList("Granite 3", "<|tool_call|>", "]"))
FORMATS.add("nemotron_v2", JsonList("Nemotron Nano v2", "<TOOLCALL>", "</TOOLCALL>"))


class Llama3Json(CallFormat):
    """A turn that is nothing but calls, separated by `;`: {"name": "search", "parameters": {"query": "..."}}

    JSON without a name and parameters is an answer, not a call.
    """

    models = "Llama 3.1, 3.2, 3.3"
    closing = "}"
    _tag, _call, _separator = "<|python_tag|>", re.compile(r'\{\s*"name"\s*:'), re.compile(r"[; \n]*")

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        text = skip_thinking(text)
        tagged = self._tag in text and not text.startswith("{")  # a text in a call may spell the tag
        turn = ((text.partition(self._tag)[2] if tagged else "") or text).strip()
        meant = tagged or self._call.match(turn) is not None
        calls, place = list[ToolCall | Unreadable](), 0
        while turn.startswith("{", place):  # a place in the text: copies of the rest would take quadratic time
            try:
                found, place = _DECODER.raw_decode(turn, place)
            except (ValueError, RecursionError):
                return [*calls, no_object("parameters")] if meant else calls
            if not tagged and not ({"name"} < found.keys() and found.keys() & {"parameters", "arguments"}):
                return calls
            calls.append(read_call(found, "arguments" if "parameters" not in found else "parameters"))
            place = self._separator.match(turn, place).end()  # pyright: ignore (it always matches)
        return calls or ([no_object("parameters")] if tagged else [])

    def write(self, call: ToolCall) -> str:
        return write_call(call, "parameters")


FORMATS.add("llama3_json", Llama3Json())


class Xlam(CallFormat):
    """A turn that is nothing but a list of calls: [{"name": "search", "arguments": {"query": "..."}}]

    A list of anything else is an answer.
    """

    models = "xLAM 2"
    closing = "]"
    _meant = re.compile(r'\[\s*+\{\s*+"name"\s*+:')

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        turn = skip_thinking(text)
        if not turn.startswith("["):
            return []
        try:
            found, _ = _DECODER.raw_decode(turn)
        except (ValueError, RecursionError):
            return [self.explain()] if self._meant.match(turn) else []
        if not all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in found):
            return []
        return [read_call(one, "arguments") for one in found]

    def write(self, call: ToolCall) -> str:
        return f"[{write_call(call, 'arguments')}]"


FORMATS.add("xlam", Xlam())


class Mistral(BlockFormat):
    """Reads both forms, and writes the newer one. Everything behind the first mark is a call.

    up to tokenizer v7:  [TOOL_CALLS][{"name": "search", "arguments": {"query": "..."}, "id": "..."}]
    from v11 on:         [TOOL_CALLS]search[ARGS]{"query": "..."}
    """

    models = "Mistral 7B v0.3, Nemo, Small, Large, Ministral, Magistral"
    opening = "[TOOL_CALLS]"
    closing = "}"
    block = (opening, None)
    # `*+` does not backtrack: thousands of blanks would take quadratic time.
    _begin = re.compile(r"\s*+(?:\[TOOL_CALLS\]\s*+)?+(?=[\[{])")
    _named = re.compile(
        r"\s*+(?:\[TOOL_CALLS\])?+([^\s\[\]{}]{1,200})(?:\[CALL_ID\]([^\[\]]{0,200}))?(?:\[ARGS\])?\s*+(?=\{)"
    )
    id_form = re.compile(r"[A-Za-z0-9]{9}")

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        place = 0
        while found := self._named.match(inner, place) or self._begin.match(inner, place):
            try:
                value, place = _DECODER.raw_decode(inner, found.end())
            except (ValueError, RecursionError):
                yield self.explain()
                return
            if found.re is self._named:
                yield with_id(read_call({"name": found[1], "arguments": value}, "arguments"), found[2])
            else:
                for one in value if isinstance(value, list) else [value]:
                    yield with_id(read_call(one, "arguments"), one.get("id") if isinstance(one, dict) else None)
        if not place:
            yield self.explain()

    def write(self, call: ToolCall) -> str:
        return f"{self.opening}{call.name}[ARGS]{json.dumps(call.arguments, ensure_ascii=False)}"

    def turn_end(self, rendered: str) -> int:
        # A list of calls ends with a bracket, a call of the newer form with a brace.
        return max(rendered.rfind("]"), rendered.rfind("}")) + 1


FORMATS.add("mistral", Mistral())
