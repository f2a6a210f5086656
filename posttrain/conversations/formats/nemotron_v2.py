"""`nemotron_v2`: what Nemotron Nano v2 writes: a list of JSON objects.

<TOOLCALL>[{"name": "search", "arguments": {"query": "..."}}]</TOOLCALL>
"""

from __future__ import annotations

from posttrain.conversations.formats.base import FORMATS, JsonList


class NemotronV2(JsonList):
    """Calls of one turn are in one list."""

    models = "Nemotron Nano v2"
    opening = "<TOOLCALL>"
    closing = "</TOOLCALL>"


FORMATS.add("nemotron_v2", NemotronV2())
