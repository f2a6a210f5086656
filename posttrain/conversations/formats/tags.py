"""Formats in which a call is a tag with its name, which holds one tag for each argument."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.formats.base import (
    FORMATS,
    BlockFormat,
    Unreadable,
    hide_json,
    read_call,
    show_json,
    write_value,
)
from posttrain.conversations.tools.base import ToolCall

NAMED_CALL = re.compile(r'\A\s*name="?([^">\n]{1,200})"?>(.*)', re.DOTALL)
"""(name, what its tag holds) of a call in a block that begins behind the tag's own word: `name="search">...`."""


def arguments(begin: str, end: str, following: str) -> re.Pattern[str]:
    """(key, value) of each argument. A value ends at its closing tag, where the next argument begins, or where all
    ends."""
    return re.compile(rf"{begin}(.*?)(?:{end}|(?={following})|\Z)", re.DOTALL)


def keys_and_values(suffix: str) -> tuple[re.Pattern[str], str]:
    """An argument whose key and value have a tag each: how it is found, and how it is written."""
    key, key_end, value, value_end = (f"<{one}{suffix}>" for one in ("arg_key", "/arg_key", "arg_value", "/arg_value"))
    found = arguments(rf"{key}(.{{1,200}}?){key_end}\s{{0,20}}{value}", value_end, key)
    return found, f"{key}{{key}}{key_end}\n{value}{{value}}{value_end}\n"


class Tags(BlockFormat):
    """Arguments are texts; the tool's schema says what type they have."""

    # Names have at most 200 characters: a search for `>` without a bound takes quadratic time on a row of open tags.
    call: re.Pattern[str]
    """(name, what its tag holds) of each call in a block."""
    argument: re.Pattern[str]
    """(key, value) of each argument in a call."""
    written: str
    """A turn with one call: its `{name}` and its `{arguments}`."""
    written_argument: str = ""
    """An argument: its `{key}` and its `{value}`."""

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        hidden, spare = hide_json(text)
        calls = self.read_tags(hidden)
        return [
            one if isinstance(one, Unreadable) else ToolCall(*show_json([one.name, one.arguments], spare))
            for one in calls
        ]

    def read_tags(self, text: str) -> list[ToolCall | Unreadable]:
        """The calls of a turn in whose arguments JSON spells no tags."""
        return super().read(text)

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        found = self.call.findall(inner)
        if not found:
            yield self.explain()
        for name, held in found:
            try:
                yield read_call({"name": name.strip(), "arguments": self.read_arguments(held)}, "arguments")
            except (ValueError, RecursionError):
                yield self.explain()

    def read_arguments(self, held: str) -> dict[str, Any]:
        """The arguments in the tag of a call; ValueError if it cannot be read."""
        return {key.strip(): value for key, value in self.argument.findall(held)}

    def write(self, call: ToolCall) -> str:
        given = "".join(self.write_argument(key, value) for key, value in call.arguments.items())
        return self.written.format(name=call.name, arguments=given)

    def write_argument(self, key: str, value: Any) -> str:
        return self.written_argument.format(key=key, value=write_value(value))


class Glm(Tags):
    """A block begins with the name. A model that samples <|observation|> or <|user|> without closing its call has that
    token in the last block."""

    models = "GLM 4.5, 4.6, 4.7, Ling 3, Laguna, Spark 2.5"
    opening = "<tool_call>"
    closing = "</tool_call>"
    call = re.compile(
        r"\A\s*([^\s<>{}]{1,200})\s*(?=<arg_key>|<\|[a-z]{1,20}\|>|\Z)(.*?)(?:<\|[a-z]{1,20}\|>|\Z)", re.DOTALL
    )
    argument, written_argument = keys_and_values("")
    written = "<tool_call>{name}\n{arguments}</tool_call>"


FORMATS.add("glm", Glm())


class Hy3(Tags):
    """A block begins with the name. All tags carry a suffix."""

    models = "Hunyuan Hy3"
    opening = "<tool_calls:opensource>"
    closing = "</tool_calls:opensource>"
    block = ("<tool_call:opensource>", "</tool_call:opensource>")
    call = re.compile(r"\A\s*([^\s<>{}]{1,200})\s*<tool_sep:opensource>(.*)", re.DOTALL)
    argument, written_argument = keys_and_values(":opensource")
    written = (
        "<tool_calls:opensource>\n<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}"
        "</tool_call:opensource>\n</tool_calls:opensource>"
    )


FORMATS.add("hy3", Hy3())


class Qwen3Coder(Tags):
    """Line ends around a value belong to its tags."""

    models = "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5"
    opening = "<tool_call>"
    closing = "</tool_call>"
    call = re.compile(r"\A\s*<function=([^>\n]{1,200})>(.*?)(?:</function>|\Z)", re.DOTALL)
    argument = arguments(r"<parameter=([^>\n]{1,200})>\n?", r"\n?(?:</parameter>|\Z)", r"\n?<parameter=")
    written = "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
    written_argument = "<parameter={key}>\n{value}\n</parameter>\n"


FORMATS.add("qwen3_coder", Qwen3Coder())


class SeedOss(Tags):
    """Qwen3-Coder's tags in a block of another name; line ends around a value belong to it."""

    models = "Seed-OSS"
    opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    call = Qwen3Coder.call
    argument = arguments(r"<parameter=([^>\n]{1,200})>", "</parameter>", "<parameter=")
    written = "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>"
    written_argument = "<parameter={key}>{value}</parameter>\n"


FORMATS.add("seed_oss", SeedOss())


class MinimaxM2(Tags):
    """One block has all calls of a turn."""

    models = "MiniMax-M2, M2.1, M2.5"
    opening = "<minimax:tool_call>"
    closing = "</minimax:tool_call>"
    call = re.compile(r'<invoke name="?([^">\n]{1,200})"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
    argument = arguments(r'<parameter name="?([^">\n]{1,200})"?>', "</parameter>", "<parameter name=")
    written = '<minimax:tool_call>\n<invoke name="{name}">\n{arguments}</invoke>\n</minimax:tool_call>'
    written_argument = '<parameter name="{key}">{value}</parameter>\n'


FORMATS.add("minimax_m2", MinimaxM2())


class MiniCpm5(Tags):
    """A text with `<`, `&` or a line end stands in a CDATA section, where tags are text.

    <function name="search"><param name="query">...</param><param name="code"><![CDATA[a < b]]></param></function>
    """

    models = "MiniCPM5"
    opening = "<function name="
    closing = "</function>"
    call = re.compile(r"""\A["']?([^"'>\n]{1,200})["']?>(.*)""", re.DOTALL)
    argument = re.compile(
        r"""<param name=["']?([^"'>\n]{1,200})["']?>"""
        r"(?:\s{0,20}<!\[CDATA\[(.*?)(?:\]\]>(?=\s{0,20}(?:</param>|\Z))|\Z)|(.*?)(?:</param>|(?=<param name=)|\Z))",
        re.DOTALL,
    )
    written = '<function name="{name}">{arguments}</function>'
    written_argument = '<param name="{key}">{value}</param>'
    _section, _section_end = "<![CDATA[", re.compile(r"\]\]>(?=\s{0,20}</param>)")

    def block_end(self, text: str, place: int, closing: str) -> int:
        end = text.find(closing, place)
        while end >= 0 and (section := text.find(self._section, place, end)) >= 0:
            found = self._section_end.search(text, section)
            if not found:
                return -1
            place = found.end()
            end = text.find(closing, place)
        return end

    def read_arguments(self, held: str) -> dict[str, Any]:
        return {key.strip(): section or text for key, section, text in self.argument.findall(held)}

    def write_argument(self, key: str, value: Any) -> str:
        if isinstance(value, str) and any(mark in value for mark in "<&\n"):
            value = f"{self._section}{value}]]>"
        return super().write_argument(key, value)


FORMATS.add("minicpm5", MiniCpm5())


class DeepseekV32(Tags):
    """`string` says whether an argument is a text or JSON. V3.2 calls the outer block `function_calls`, V4
    `tool_calls`."""

    models = "DeepSeek-V3.2, V4"
    opening = "<｜DSML｜"
    closing = "</｜DSML｜function_calls>"
    block = ("<｜DSML｜invoke", "</｜DSML｜invoke>")
    call = re.compile(r'\A\s*name="([^"\n]{1,200})"\s*>(.*)', re.DOTALL)
    argument = arguments(
        r'<｜DSML｜parameter name="([^"\n]{1,200})"(?: string="(true|false)")?>',
        "</｜DSML｜parameter>",
        "<｜DSML｜parameter ",
    )
    written = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>"
    )
    _block_end = re.compile(r"</｜DSML｜(?:function|tool)_calls>")

    def read_arguments(self, held: str) -> dict[str, Any]:
        found = self.argument.findall(held)
        return {key: json.loads(text) if is_text == "false" else text for key, is_text, text in found}

    def write_argument(self, key: str, value: Any) -> str:
        is_text = str(isinstance(value, str)).lower()
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{write_value(value)}</｜DSML｜parameter>\n'

    def turn_end(self, rendered: str) -> int:
        return [found.end() for found in self._block_end.finditer(rendered)][-1]


FORMATS.add("deepseek_v32", DeepseekV32())


_TYPES = {str: "string", bool: "boolean", type(None): "null", int: "number", float: "number", list: "array"}


class KimiK3(Tags):
    """Tags between special tokens. An argument is JSON unless its type is `string`."""

    models = "Kimi K3"
    opening = "<|open|>tools<|sep|>"
    closing = "<|close|>tools<|sep|>"
    streams = False
    block = ("<|open|>call ", "<|close|>call<|sep|>")
    call = re.compile(r'\A\s*tool="([^"\n]{1,200})"[^<\n]{0,40}<\|sep\|>(.*)', re.DOTALL)
    argument = re.compile(
        r'<\|open\|>(?:argument key="([^"\n]{0,200})"|(json)) type="([a-z]{1,10})"<\|sep\|>(.*?)'
        r"(?:<\|close\|>(?:argument|json)<\|sep\|>|\Z)",
        re.DOTALL,
    )
    written = (
        '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{arguments}<|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    )
    word_marks = re.compile(r"<\|(?:open|close)\|>(?:response|message)[^<\n]{0,40}<\|sep\|>|<\|end_of_msg\|>")

    def read_block(self, inner: str) -> Iterator[ToolCall | Unreadable]:
        for call in super().read_block(inner):
            yield call if isinstance(call, Unreadable) else ToolCall(html.unescape(call.name), call.arguments)

    def read_arguments(self, held: str) -> dict[str, Any]:
        given = dict[str, Any]()
        for key, is_object, kind, text in self.argument.findall(held):
            value = text if kind == "string" else json.loads(text)
            given |= value if is_object and isinstance(value, dict) else {html.unescape(key): value}
        return given

    def write(self, call: ToolCall) -> str:
        return super().write(ToolCall(_escaped(call.name), call.arguments))

    def write_argument(self, key: str, value: Any) -> str:
        head = f'<|open|>argument key="{_escaped(key)}" type="{_TYPES.get(type(value), "object")}"<|sep|>'
        return f"{head}{write_value(value)}<|close|>argument<|sep|>"


FORMATS.add("kimi_k3", KimiK3())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


_MARK = "]<]minimax[>["


class MinimaxM3(Tags):
    """Every tag stands behind a mark, and nested values are nested tags; those of a list have the name `item`."""

    models = "MiniMax-M3"
    opening = f"{_MARK}<tool_call>"
    closing = f"{_MARK}</tool_call>"
    block = (f"{_MARK}<invoke", f"{_MARK}</invoke>")
    call = NAMED_CALL
    written = f'{opening}\n{_MARK}<invoke name="{{name}}">{{arguments}}{_MARK}</invoke>\n{closing}'
    _tag = re.compile(re.escape(_MARK) + r"<(/?)([^<>\n]{1,200})>")

    def read_arguments(self, held: str) -> dict[str, Any]:
        """Without recursion: a model may nest values as deep as it likes."""
        stack, place = [("", list[tuple[str, Any]]())], 0
        for tag in self._tag.finditer(held):
            closes, name = tag.groups()
            if not closes:
                stack.append((name, []))
            else:
                opened, members = stack.pop()
                if not stack or name != opened:
                    raise ValueError("tags do not match")
                stack[-1][1].append((name, _value(members, held[place : tag.start()])))
            place = tag.end()
        if len(stack) != 1:
            raise ValueError("a tag is not closed")
        return dict(stack[0][1])

    def write_argument(self, key: str, value: Any) -> str:
        match value:
            case str():
                inner = value
            case dict():
                inner = "".join(self.write_argument(name, one) for name, one in value.items())
            case list():
                inner = "".join(self.write_argument("item", one) for one in value)
            case _:
                inner = json.dumps(value)
        return f"{_MARK}<{key}>{inner}{_MARK}</{key}>"


FORMATS.add("minimax_m3", MinimaxM3())


def _value(members: list[tuple[str, Any]], text: str) -> Any:
    if not members:
        return text
    return [one for _, one in members] if all(name == "item" for name, _ in members) else dict(members)
