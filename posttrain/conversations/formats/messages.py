"""Formats in which a turn is several messages: a call is a message to a function, and thinking is a message, too."""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable, hide_json, show_json
from posttrain.conversations.formats.tags import NAMED_CALL, Tags, arguments
from posttrain.conversations.tools.base import ToolCall


def split_messages(text: str, end: re.Pattern[str]) -> list[tuple[str, str]]:
    """(header, body) of each message of a turn. One without a header is a body."""
    found, (hidden, spare) = list[tuple[str, str]](), hide_json(text)
    for message in hidden.split("<|start|>"):
        header, has_body, body = message.partition("<|message|>")
        header, body = (header, end.split(body, maxsplit=1)[0]) if has_body else ("", header)
        found.append((header, show_json(body, spare)))
    return found


class Harmony(CallFormat):
    """The recipient stands in the header of a message, before or behind its channel. `<|call|>` ends the turn.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.search
    <|constrain|>json<|message|>{"query": "..."}<|call|>
    """

    models = "gpt-oss"
    streams = False
    closing = "}"
    _end = re.compile(r"<\|(?:call|end|return)\|>")
    _recipient = re.compile(r"\bto=([^\s<]{1,200})")

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        named = [(self._recipient.search(header), body) for header, body in split_messages(text, self._end)]
        return [self.read_json(to[1].removeprefix("functions."), body) for to, body in named if to]

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        bodies: dict[bool, list[str]] = {True: [], False: []}
        for header, body in split_messages(text, self._end):
            if not self._recipient.search(header):
                bodies["analysis" in header].append(body)
        return "\n".join(bodies[True]), "".join(bodies[False])

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        return f"{header}<|message|>{arguments}<|call|>"


FORMATS.add("harmony", Harmony())


class MuseGlimmer(Tags):
    """A call is a message whose body has tags; thinking is a message of the model to itself."""

    models = "Muse Glimmer"
    streams = False
    opening = "<atem:function_calls>"
    closing = "</atem:function_calls>"
    block = ("<atem:invoke", "</atem:invoke>")
    call = NAMED_CALL
    argument = arguments(r'<atem:parameter name="?([^">\n]{1,200})"?>', "</atem:parameter>", "<atem:parameter ")
    written = (
        ' to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n'
        "</atem:function_calls>"
    )
    written_argument = '<atem:parameter name="{key}">{value}</atem:parameter>\n'
    _end = re.compile(r"<\|(?:eom|eot)\|>")
    _to_itself = re.compile(r"\bto=self\b")

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        said = [body for header, body in split_messages(text, self._end) if not self._to_itself.search(header)]
        return [call for body in said if "<atem:invoke" in body for call in super(MuseGlimmer, self).read(body)]

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        bodies: dict[bool, list[str]] = {True: [], False: []}
        for header, body in split_messages(text, self._end):
            is_thinking = self._to_itself.search(header) is not None
            bodies[is_thinking].append(body.partition(self.opening)[0] if has_calls else body)
        return "\n".join(bodies[True]), "".join(bodies[False])


FORMATS.add("muse_glimmer", MuseGlimmer())
