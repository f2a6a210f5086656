"""Calls of tools in a conversation's messages, as chat templates read them.

{"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": {"query": "Rome"}}}]}, or name and
arguments without `function` around them. Arguments may be JSON in a string, as OpenAI's interface gives them; most
templates would write that string in quotes, so it is read. Nulls in arguments are left out: parquet writes them into
every call that lacks an argument which another one has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.data.rows import DataError

_SHAPE = '{"function": {"name": "...", "arguments": {...}}}'


def tool_calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of one message, their arguments as mappings; `where` serves errors."""
    if not isinstance(value, list):
        raise DataError(f"The tool_calls of {where} are a {type(value).__name__}; they must be a list of {_SHAPE}.")
    return [_call(one, f"tool call {number} of {where}") for number, one in enumerate(value, start=1)]


def parts_of(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call that `tool_calls_of` gave."""
    function = call.get("function", call)
    return function["name"], function["arguments"]


def left_out(calls: list[dict[str, Any]], written: str) -> str | None:
    """The first name or text of these calls that a rendered turn does not hold; None where it holds all of them."""
    for name, arguments in map(parts_of, calls):
        for text in (name, *_texts(arguments)):
            if not any(form in written for form in (text, json.dumps(text)[1:-1], _unicode(text))):
                return text
    return None


def _call(value: Any, where: str) -> dict[str, Any]:
    call = without_nulls(value) if isinstance(value, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"The {where} has no name; a call is {_SHAPE}.")
    given = function.get("arguments", {})
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except ValueError as error:
            raise DataError(f"The arguments of the {where} are not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise DataError(f"The arguments of the {where} are a {type(given).__name__}; they must be a mapping.")
    complete = {**function, "arguments": given}
    return {**call, "function": complete} if "function" in call else complete


def without_nulls(value: Any) -> Any:
    """The value without what parquet fills in for fields that only other rows have."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _texts(value: Any) -> Iterator[str]:
    """Names and strings in arguments; numbers are written in more ways than one."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def _unicode(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
