"""`harmony`: what gpt-oss writes. A call is a message to a function; thinking is a message on another channel.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json
<|message|>{"query": "..."}<|call|>
"""

from __future__ import annotations

import json
import re

from posttrain.conversations.formats.base import FORMATS, CallFormat, Unreadable
from posttrain.conversations.tools.base import ToolCall

_RECIPIENT = re.compile(r"\bto=([^\s<]{1,200})")
_END = re.compile(r"<\|(?:call|end|return)\|>")


class Harmony(CallFormat):
    """The recipient stands in the header of a message, before or behind its channel. `<|call|>` ends the turn."""

    models = "gpt-oss"
    streams = False
    closing = "}"

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        calls = list[ToolCall | Unreadable]()
        for message in text.split("<|start|>"):
            header, has_body, body = message.partition("<|message|>")
            if has_body and (to := _RECIPIENT.search(header)):
                calls.append(self.read_json(to[1].removeprefix("functions."), _END.split(body, maxsplit=1)[0]))
        return calls

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        bodies: dict[bool, list[str]] = {True: [], False: []}
        for message in text.split("<|start|>"):
            header, has_body, body = message.partition("<|message|>")
            if not has_body:
                bodies[False].append(header)
            elif not _RECIPIENT.search(header):
                bodies["analysis" in header].append(_END.split(body, maxsplit=1)[0])
        return "\n".join(bodies[True]), "".join(bodies[False])

    def write(self, call: ToolCall) -> str:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json"
        return f"{header}<|message|>{arguments}<|call|>"


FORMATS.add("harmony", Harmony())
