"""Calls of tools as models write them. A format is a function from a turn's text to its calls, in order.

`hermes` is what Qwen2.5, Qwen3, Hermes and many others write:

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from posttrain.rollout.tools.base import ToolCall


class Unreadable(ValueError):
    """Something that was meant as a call and is none; the words are for the model."""


CallFormat = Callable[[str], list[ToolCall | Unreadable]]
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes_calls(text: str) -> list[ToolCall | Unreadable]:
    """The calls of a turn; one whose end is missing is read as far as it goes."""
    return [_hermes_call(inner.strip()) for inner in _HERMES.findall(text)]


def _hermes_call(text: str) -> ToolCall | Unreadable:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
        if isinstance(arguments, str):  # some write them as OpenAI's interface gives them
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Unreadable('A tool call must be one JSON object: {"name": ..., "arguments": {...}}.')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Unreadable('In a tool call "name" is a text and "arguments" is an object.')
    return ToolCall(name, arguments)


FORMATS: dict[str, CallFormat] = {"hermes": hermes_calls}
