"""Calls of tools as models write them. A format is a function from a turn's text to its calls, in order.

`hermes` is what Qwen2.5, Qwen3, Hermes and many others write:

    <tool_call>
    {"name": "search", "arguments": {"query": "..."}}
    </tool_call>

`llama3_json` is what Llama 3.1 and later write: a turn that is nothing but calls, with `;` between several.

    {"name": "search", "parameters": {"query": "..."}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from posttrain.rollout.tools.arguments import MOST_NESTED, is_shallow
from posttrain.rollout.tools.base import ToolCall


class Unreadable(ValueError):
    """Something that was meant as a call and is none; the words are for the model."""


CallFormat = Callable[[str], list[ToolCall | Unreadable]]
_PYTHON_TAG, _LLAMA_CALL = "<|python_tag|>", re.compile(r'\{\s*"name"\s*:')
_DECODER, _BETWEEN = json.JSONDecoder(), re.compile(r"[; \n]*")
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def hermes_calls(text: str) -> list[ToolCall | Unreadable]:
    """The calls of a turn; one whose end is missing is read as far as it goes."""
    return [_hermes_call(inner.strip()) for inner in _HERMES.findall(text)]


def _hermes_call(text: str) -> ToolCall | Unreadable:
    try:
        return _call(json.loads(text), "arguments")
    except (ValueError, RecursionError):
        return _no_object("arguments")


def llama3_calls(text: str) -> list[ToolCall | Unreadable]:
    """The calls of a turn that begins with one. JSON without a name and parameters is an answer, not a call."""
    marked, turn = _PYTHON_TAG in text, (text.partition(_PYTHON_TAG)[2] or text).strip()
    meant = marked or _LLAMA_CALL.match(turn) is not None
    calls, at = list[ToolCall | Unreadable](), 0
    while turn.startswith("{", at):  # a place in the text, not the rest of it: copies would take quadratic time
        try:
            found, at = _DECODER.raw_decode(turn, at)
        except (ValueError, RecursionError):
            return [*calls, _no_object("parameters")] if meant else calls
        if not marked and not ({"name"} < found.keys() and found.keys() & {"parameters", "arguments"}):
            return calls
        calls.append(_call(found, "arguments" if "parameters" not in found else "parameters"))
        at = _BETWEEN.match(turn, at).end()  # pyright: ignore (it matches nothing, too)
    return calls or ([_no_object("parameters")] if marked else [])


def _call(found: Any, key: str) -> ToolCall | Unreadable:
    try:
        name, arguments = found["name"], found.get(key, {})
        if isinstance(arguments, str):  # some write them as OpenAI's interface gives them
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _no_object(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Unreadable(f'In a tool call "name" is a text and "{key}" is an object.')
    if not is_shallow(arguments):
        return Unreadable(f'The "{key}" of a tool call may be nested {MOST_NESTED} deep at most.')
    return ToolCall(name, arguments)


def _no_object(key: str) -> Unreadable:
    return Unreadable(f'A tool call must be one JSON object: {{"name": ..., "{key}": {{...}}}}.')


FORMATS: dict[str, CallFormat] = {"hermes": hermes_calls, "llama3_json": llama3_calls}
