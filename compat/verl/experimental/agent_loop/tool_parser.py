"""Tool calls of a turn, read by posttrain's formats (posttrain/conversations/formats)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.tools.base import ToolCall
from verl._missing import not_given

__getattr__ = not_given(__name__)
Parser = TypeVar("Parser", bound="type[ToolParser]")
_NAMES = {"gpt-oss": "harmony"}
"""verl's names of formats that are called otherwise here."""


@dataclass
class FunctionCall:
    """A call: its arguments are JSON text."""

    name: str
    arguments: str


class ToolParser(ABC):
    """Reads calls; a subclass may be registered under a name."""

    _registry: dict[str, type[ToolParser]] = {}  # noqa: RUF012

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """(the turn as text, its calls)."""

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        def decorate(parser: Parser) -> Parser:
            cls._registry[name] = parser
            return parser

        return decorate

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """The parser of a name: one that was registered, or that of a format of posttrain's."""
        if name in cls._registry:
            return cls._registry[name](tokenizer)
        if _NAMES.get(name, name) not in FORMATS:
            raise ValueError(f"Unknown tool parser: {name}; there are {', '.join([*cls._registry, *FORMATS])}")
        return FormatParser(tokenizer, _NAMES.get(name, name))


class FormatParser(ToolParser):
    """Reads calls by a format of posttrain's. What cannot be read is no call."""

    def __init__(self, tokenizer: Any, format: str) -> None:
        super().__init__(tokenizer)
        self.format = FORMATS[format]

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self.tokenizer.decode(list(responses_ids), skip_special_tokens=False)
        calls = [one for one in self.format.read(text) if isinstance(one, ToolCall)]
        found = [FunctionCall(name=one.name, arguments=json.dumps(one.arguments, ensure_ascii=False)) for one in calls]
        return text, found
