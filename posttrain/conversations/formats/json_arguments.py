"""Formats in which a call is a name, then its arguments as a JSON object, between special tokens."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.formats.base import FORMATS, BlockFormat, Unreadable, with_id
from posttrain.conversations.tools.base import ToolCall


class JsonArguments(BlockFormat):
    """Each block is one call."""

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        name, arguments = self.take_apart(inner)
        yield with_id(self.read_json(name, arguments), self.take_id(inner))

    @abstractmethod
    def take_apart(self, inner: str) -> tuple[str, str]:
        """(the name, the arguments as JSON) of a call. What is no JSON makes it unreadable."""

    def take_id(self, inner: str) -> str | None:
        """The id that the model gave a call; None in formats without ids."""
        return None


class DeepseekV3(JsonArguments):
    """Reads both forms, and writes the newer one.

    V3.1:    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "..."}<｜tool▁call▁end｜> ...
    V3, R1:  ... <｜tool▁call▁begin｜>function<｜tool▁sep｜>search, and the arguments in a fenced block of JSON
    """

    models = "DeepSeek-V3, R1, V3.1"
    opening = "<｜tool▁calls▁begin｜>"
    closing = "<｜tool▁calls▁end｜>"
    block = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    _fenced = re.compile(r"\s*+([^\n`]{1,200})\n?```(?:json)?(.*)", re.DOTALL)

    def take_apart(self, inner: str) -> tuple[str, str]:
        name, _, rest = inner.partition("<｜tool▁sep｜>")
        fenced = self._fenced.match(rest) if name.strip() == "function" else None
        # A text in the arguments may have a fence, too.
        return (fenced[1], fenced[2].rstrip().removesuffix("```")) if fenced else (name, rest)

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        return f"{self.opening}{inner}{self.closing}"


FORMATS.add("deepseek_v3", DeepseekV3())


class KimiK2(JsonArguments):
    """The name stands in the call's id, `functions.NAME:NUMBER`, with the call's number in the conversation.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "..."}
    <|tool_call_end|><|tool_calls_section_end|>
    """

    models = "Kimi K2"
    opening = "<|tool_calls_section_begin|>"
    closing = "<|tool_calls_section_end|>"
    block = ("<|tool_call_begin|>", "<|tool_call_end|>")

    def take_apart(self, inner: str) -> tuple[str, str]:
        call_id, _, arguments = inner.partition("<|tool_call_argument_begin|>")
        name, colon, number = call_id.strip().removeprefix("functions.").rpartition(":")
        return (name if colon and number.isdigit() else call_id), arguments

    def take_id(self, inner: str) -> str:
        return inner.partition("<|tool_call_argument_begin|>")[0].strip()

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"<|tool_call_begin|>{self.call_id(call.name, 0)}<|tool_call_argument_begin|>{arguments}"
        return f"{self.opening}{inner}<|tool_call_end|>{self.closing}"

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}"


FORMATS.add("kimi_k2", KimiK2())


class SolarOpen(JsonArguments):
    """Thinking, words and calls are messages of one turn.

    <|think|>...<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>search<|tool_call:args|>
    {"query": "..."}<|tool_call:end|>
    """

    models = "Solar Open"
    opening = "<|tool_calls|>"
    closing = "<|tool_call:end|>"
    streams = False
    block = ("<|tool_call:begin|>", "<|tool_call:end|>")
    word_marks = re.compile(r"<\|end\|>|(?:<\|begin\|>assistant)?<\|content\|>|<\|begin\|>assistant")

    def take_apart(self, inner: str) -> tuple[str, str]:
        name, _, arguments = inner.partition("<|tool_call:name|>")[2].partition("<|tool_call:args|>")
        return name, arguments

    def take_id(self, inner: str) -> str:
        return inner.partition("<|tool_call:name|>")[0]

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        inner = f"{self.call_id(call.name, 0)}<|tool_call:name|>{call.name}<|tool_call:args|>{arguments}"
        return f"{self.opening}<|tool_call:begin|>{inner}{self.closing}"


FORMATS.add("solar_open", SolarOpen())


class Gemma(JsonArguments):
    """The braces hold JSON, but keys have no quotes, and texts stand between marks. A result continues the turn.

    Gemma 4:        <|tool_call>call:search{query:<|"|>...<|"|>,limit:3}<tool_call|>
    FunctionGemma:  <start_function_call>call:search{query:<escape>...<escape>,limit:3}<end_function_call>
    """

    _name = re.compile(r"\s*call:([^\s{}<>]{1,200})(?=\{)")
    _word = re.compile(r"[^\s{}\[\],:\"]{1,200}")

    def __init__(self, models: str, opening: str, closing: str, quote: str) -> None:
        """quote: what stands before and behind a text."""
        self.models, self.opening, self.closing, self._quote = models, opening, closing, quote

    def block_end(self, text: str, place: int, closing: str) -> int:
        end = text.find(closing, place)
        while end >= 0 and text.count(self._quote, place, end) % 2:  # the mark stands in quotes
            quote = text.find(self._quote, end)
            if quote < 0:
                return end
            place = quote + len(self._quote)
            end = text.find(closing, place)
        return end

    def take_apart(self, inner: str) -> tuple[str, str]:
        found = self._name.match(inner)
        return (found[1], self._as_json(inner[found.end() :])) if found else ("", "")

    def write(self, call: ToolCall) -> str:
        given = ",".join(f"{key}:{self._write(value)}" for key, value in call.arguments.items())
        return f"{self.opening}call:{call.name}{{{given}}}{self.closing}"

    def _as_json(self, text: str) -> str:
        """The same object as JSON. Every second piece between the quotes is a text."""
        pieces = text.split(self._quote)
        return "".join(
            json.dumps(piece) if at % 2 else self._word.sub(_as_json_word, piece) for at, piece in enumerate(pieces)
        )

    def _write(self, value: Any) -> str:
        match value:
            case str():
                return f"{self._quote}{value}{self._quote}"
            case dict():
                return "{" + ",".join(f"{key}:{self._write(one)}" for key, one in value.items()) + "}"
            case list():
                return "[" + ",".join(map(self._write, value)) + "]"
        return json.dumps(value)


FORMATS.add("gemma4", Gemma("Gemma 4", "<|tool_call>", "<tool_call|>", '<|"|>'))
# A template may write all values as texts.
FORMATS.add("functiongemma", Gemma("FunctionGemma", "<start_function_call>", "<end_function_call>", "<escape>"))


def _as_json_word(word: re.Match[str]) -> str:
    """Keys are words before a colon."""
    if word.string.startswith(":", word.end()):
        return json.dumps(word[0])
    return "null" if word[0] == "None" else word[0]  # as the chat template of Gemma 4 writes it
