"""Tools as chat templates see them, calls that a model wrote, and what a tool answers."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from typing import Any


class Schema:
    """The base: from a dict with `model_validate`, to one with `model_dump`."""

    @classmethod
    def model_validate(cls, values: Any) -> Any:
        if isinstance(values, cls):
            return values
        kinds = typing.get_type_hints(cls)
        known = {one.name for one in dataclasses.fields(cls)}  # pyright: ignore
        return cls(**{name: _made(kinds[name], value) for name, value in values.items() if name in known})

    def model_dump(self, exclude_unset: bool = False, exclude_none: bool = False, **kwargs: Any) -> dict[str, Any]:
        return _plain(dataclasses.asdict(self), exclude_unset or exclude_none)  # pyright: ignore

    def __post_init__(self) -> None:
        for name, kind in typing.get_type_hints(type(self)).items():
            setattr(self, name, _made(kind, getattr(self, name)))


def _made(kind: Any, value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, Schema):
        return kind.model_validate(value)
    inner = typing.get_args(kind)
    if isinstance(value, dict) and typing.get_origin(kind) is dict:
        return {name: _made(inner[1], one) for name, one in value.items()}
    return value


def _plain(value: Any, no_none: bool) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one, no_none) for name, one in value.items() if one is not None or not no_none}
    return [_plain(one, no_none) for one in value] if isinstance(value, list) else value


@dataclass
class OpenAIFunctionPropertySchema(Schema):
    """One parameter."""

    type: Any = "string"
    description: str | None = None
    enum: list[Any] | None = None


@dataclass
class OpenAIFunctionParametersSchema(Schema):
    """The parameters of a function."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)


@dataclass
class OpenAIFunctionSchema(Schema):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


@dataclass
class OpenAIFunctionToolSchema(Schema):
    """A tool: `{"type": "function", "function": {...}}`."""

    type: str
    function: OpenAIFunctionSchema


@dataclass
class OpenAIFunctionParsedSchema(Schema):
    """A call as a model wrote it: its arguments are a text."""

    name: str
    arguments: str


@dataclass
class OpenAIFunctionCallSchema(Schema):
    """A call with its arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(parsed_schema: Any) -> tuple[OpenAIFunctionCallSchema, bool]:
        """(the call, whether its arguments could not be read)."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except json.JSONDecodeError:
            arguments = None
        read = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(parsed_schema.name, arguments if read else {}), not read


@dataclass
class OpenAIFunctionToolCall(Schema):
    """A call with its number."""

    id: str
    function: OpenAIFunctionCallSchema
    type: str = "function"


@dataclass
class ToolResponse(Schema):
    """What a tool answers: text, pictures, films."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("image", "video"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), list):
                raise ValueError(f"`{name}` of a tool's response is a list, not a {type(getattr(self, name))}")

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not self.image and not self.video
