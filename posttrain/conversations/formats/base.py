"""The interface of a call format, and what formats of JSON calls share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any

from posttrain.conversations.tools.arguments import MOST_NESTED, is_shallow
from posttrain.conversations.tools.base import ToolCall
from posttrain.registry import Registry


class Unreadable(ValueError):
    """Text that was meant as a call and cannot be read; the message is for the model."""


class CallFormat(ABC):
    """How one family of models writes tool calls. Example: `FORMATS["hermes"].read(text)`."""

    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides those of the settings: for models that do not end it behind a call themselves."""

    @abstractmethod
    def read(self, text: str) -> list[ToolCall | Unreadable]:
        """The calls of a turn, in order; special tokens are in the text."""

    @abstractmethod
    def write(self, call: ToolCall) -> str:
        """A call as the model would write it."""


FORMATS: Registry[CallFormat] = Registry("format of tool calls", package="posttrain.conversations.formats")


def read_call(found: Any, key: str) -> ToolCall | Unreadable:
    """A call from its JSON object, which has the arguments under `key`."""
    try:
        name, arguments = found["name"], found.get(key, {})
        if isinstance(arguments, str):  # JSON inside a string, as in OpenAI's API
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return no_object(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Unreadable(f'In a tool call "name" is a text and "{key}" is an object.')
    if not is_shallow(arguments):
        return Unreadable(f'The "{key}" of a tool call may be nested {MOST_NESTED} deep at most.')
    return ToolCall(name, arguments)


def write_call(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def no_object(key: str) -> Unreadable:
    return Unreadable(f'A tool call must be one JSON object: {{"name": ..., "{key}": {{...}}}}.')
