"""Tool calls of a turn, read by posttrain's formats (posttrain/conversations/formats).

Unlike verl's, these parsers read no calls that a model quotes while it thinks.
"""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from posttrain.conversations.formats.base import FORMATS, find_blocks
from posttrain.conversations.tools.base import ToolCall
from verl.utils.rollout_trace import rollout_trace_op

Parser = TypeVar("Parser", bound="type[ToolParser]")
_THOUGHT = re.compile(r"(<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>.*?<\|end\|>", re.DOTALL)
_HARMONY_CALL = re.compile(r"<\|start\|>assistant<\|channel\|>[^<]* to=functions\.[^<]+<.*?<\|call\|>", re.DOTALL)


@dataclass
class FunctionCall:
    """A call: its arguments are JSON text; the id is the model's own, if it writes one."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Reads calls; a subclass may be registered under a name."""

    _registry: dict[str, type[ToolParser]] = {}  # noqa: RUF012

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn behind its calls, besides the model's own end token."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        """(the words of the turn, its calls)."""

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
        if name not in FORMATS:
            known = ", ".join(dict.fromkeys([*cls._registry, *FORMATS]))
            raise ValueError(f"Unknown tool parser: {name}; there are {known}")
        return FormatParser(tokenizer, name)


class FormatParser(ToolParser):
    """Reads calls by a format of posttrain's. What cannot be read is no call."""

    format_name: ClassVar[str] = ""
    stop_token: ClassVar[str] = ""
    is_cut_out: ClassVar[bool] = False
    """Whether words may stand behind a call; else a turn's words end where its calls begin."""

    def __init__(self, tokenizer: Any, format: str = "") -> None:
        super().__init__(tokenizer)
        self.format = FORMATS[format or self.format_name]

    @property
    def stop_token_ids(self) -> list[int]:
        found = self.tokenizer.convert_tokens_to_ids(self.stop_token) if self.stop_token else None
        return [found] if isinstance(found, int) and found >= 0 else []

    @rollout_trace_op
    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Any = None
    ) -> tuple[str, list[FunctionCall]]:
        text = self._prepared(self.tokenizer.decode(list(responses_ids), skip_special_tokens=False))
        found = self._read(text, tools or [])
        return (self._words(text) if found or self.is_cut_out else text), found

    def _prepared(self, text: str) -> str:
        return text

    def _read(self, text: str, tools: Sequence[Any]) -> list[FunctionCall]:
        calls = [one for one in self.format.read(text) if isinstance(one, ToolCall)]
        return [self._written(call, tools) for call in calls]

    def _written(self, call: ToolCall, tools: Sequence[Any]) -> FunctionCall:
        return FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False))

    def _words(self, text: str) -> str:
        opening, closing = re.escape(self.format.opening), re.escape(self.format.closing)
        if self.is_cut_out:
            return re.sub(f"{opening}.*?{closing}", "", text, flags=re.DOTALL)
        return re.split(opening, text, maxsplit=1)[0] if opening else self.format.split(text, has_calls=True)[1]


@ToolParser.register("hermes")
class HermesToolParser(FormatParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""

    format_name, is_cut_out = "hermes", True


@ToolParser.register("gpt-oss")
class GptOssToolParser(FormatParser):
    """A message to `functions.NAME`; messages of the analysis channel are neither words nor calls."""

    format_name = "harmony"

    def _prepared(self, text: str) -> str:
        padding = getattr(self.tokenizer, "pad_token", None)
        return _THOUGHT.sub("", text.replace(padding, "") if padding else text)

    def _words(self, text: str) -> str:
        return _HARMONY_CALL.sub("", text)


@ToolParser.register("qwen3_coder")
class Qwen3XMLToolParser(FormatParser):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`: a value has the type of the tool's schema."""

    format_name = "qwen3_coder"

    def _parse_xml_function_call(self, function_call_str: str, tools: Sequence[Any] | None) -> FunctionCall | None:
        """The call that stands behind `<function=`; None if its name does not end."""
        found = self._read(f"<tool_call><function={function_call_str}</function></tool_call>", tools or [])
        return found[0] if found and ">" in function_call_str else None

    def _written(self, call: ToolCall, tools: Sequence[Any]) -> FunctionCall:
        known = {tool.function.name: tool.function.parameters.properties for tool in tools}.get(call.name, {})
        kinds = {key: str(known[key].type).strip().lower() if key in known else "string" for key in call.arguments}
        typed = {key: _typed(value, kinds[key]) for key, value in call.arguments.items()}
        return super()._written(ToolCall(call.name, typed), tools)


@ToolParser.register("glm")
class GLMToolParser(FormatParser):
    """`<tool_call>NAME<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`: values are JSON, or else texts."""

    format_name, stop_token = "glm", "<|observation|>"

    def _written(self, call: ToolCall, tools: Sequence[Any]) -> FunctionCall:
        typed = {key: _decoded(value, json.loads) for key, value in call.arguments.items()}
        return super()._written(ToolCall(call.name, typed), tools)

    def _words(self, text: str) -> str:
        return re.sub(r"^\s*(<think>.*?)?</think>", "", super()._words(text), flags=re.DOTALL)


@ToolParser.register("minimax")
class MiniMaxToolParser(GLMToolParser):
    """`<invoke name="NAME"><parameter name="KEY">...</parameter></invoke>`: values are JSON, or else texts."""

    format_name, stop_token = "minimax_m2", ""


@ToolParser.register("kimi")
class KimiToolParser(FormatParser):
    """`<|tool_call_begin|>ID<|tool_call_argument_begin|>{...}<|tool_call_end|>`: the id is kept, and names the tool."""

    format_name, stop_token = "kimi_k2", "<|im_end|>"

    def _read(self, text: str, tools: Sequence[Any]) -> list[FunctionCall]:
        blocks = find_blocks(text, "<|tool_call_begin|>", "<|tool_call_end|>")
        ids = [block.partition("<|tool_call_argument_begin|>")[0].strip() for block in blocks]
        found = zip(ids, self.format.read(text), strict=True)
        return [
            FunctionCall(_named(call, tools), json.dumps(call.arguments, ensure_ascii=False), own)
            for own, call in found
            if isinstance(call, ToolCall)
        ]


def _named(call: ToolCall, tools: Sequence[Any]) -> str:
    """The tool that a call means: by its name, by a part of it, or by the arguments that only one tool requires."""
    functions = [tool.function for tool in tools]
    if call.name in [one.name for one in functions]:
        return call.name
    spelt = call.name.lower().replace("-", "_")
    parts = [one.name for one in functions if one.name.lower() in spelt]
    needs = [
        one.name for one in functions if one.parameters.required and {*one.parameters.required} <= {*call.arguments}
    ]
    return next((names[0] for names in (parts, needs) if len(names) == 1), call.name)


def _typed(text: str, kind: str) -> Any:
    """A value from its text; the text itself where it is not of that type."""
    if text.lower() == "null":
        return None
    if kind in ("string", "str", "text", "varchar", "char", "enum"):
        return text
    if kind in ("boolean", "bool", "binary"):
        return text.lower() == "true"
    if kind.startswith(("int", "uint", "long", "short", "unsigned")):
        return _decoded(text, int)
    if kind.startswith(("num", "float")):
        return _decoded(text, lambda one: int(float(one)) if float(one).is_integer() else float(one))
    if kind == "object" or kind.startswith("dict"):
        text = _decoded(text, json.loads)
    return _decoded(text, ast.literal_eval) if isinstance(text, str) else text  # literals only: nothing is executed


def _decoded(text: Any, read: Callable[[str], Any]) -> Any:
    try:
        return read(text) if isinstance(text, str) else text
    except (ValueError, SyntaxError, OverflowError, RecursionError, MemoryError):
        return text
