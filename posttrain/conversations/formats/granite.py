"""`granite`: what Granite 3 writes: a list of JSON objects to the end of the turn.

<|tool_call|>[{"name": "search", "arguments": {"query": "..."}}]
"""

from __future__ import annotations

from posttrain.conversations.formats.base import FORMATS, JsonList


class Granite(JsonList):
    """Nothing closes the list but its bracket."""

    models = "Granite 3"
    opening = "<|tool_call|>"
    closing = "]"


FORMATS.add("granite", Granite())
