"""`apriel`: what Apriel, Hunyuan A13B, MiniMax-M1 write: a list of JSON objects.

<tool_calls>[{"name": "search", "arguments": {"query": "..."}}]</tool_calls>
"""

from __future__ import annotations

from posttrain.conversations.formats.base import FORMATS, JsonList


class Apriel(JsonList):
    """Calls of one turn are in one list."""

    models = "Apriel, Hunyuan A13B, MiniMax-M1"
    opening = "<tool_calls>"
    closing = "</tool_calls>"


FORMATS.add("apriel", Apriel())
