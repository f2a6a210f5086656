"""How models write tool calls. A format is one file here: it reads the calls of a turn, writes a call, and may name
texts that end a turn. Add a file with a `CallFormat` subclass, its line in `FORMATS`, and its name in
`posttrain/config/turns.py`."""

from __future__ import annotations

from posttrain.conversations.formats.base import CallFormat, Unreadable
from posttrain.conversations.formats.hermes import Hermes
from posttrain.conversations.formats.llama3_json import Llama3Json

__all__ = ["FORMATS", "CallFormat", "Unreadable"]

FORMATS: dict[str, CallFormat] = {"hermes": Hermes(), "llama3_json": Llama3Json()}
