"""A request and its answer, as all APIs share them, and the reading of JSON bodies.

A field that would change the result and is not implemented is rejected: a client must not get other samples than it
asked for. `null` counts as absent, as clients send it for what they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.conversations.tools.base import ToolCall
from posttrain.rollout.base import Output

Message = dict[str, Any]
"""As OpenAI's chat API has it: role, content (text), tool_calls with parsed arguments, tool_call_id, name."""


class ApiError(Exception):
    """A request that is not answered. Each API writes it in its own form."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class ContextFull(ApiError):
    """The prompt leaves no room for a response."""

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your request has {tokens} tokens.",
            param="messages",
            code="context_length_exceeded",
        )
        self.tokens, self.most = tokens, most


@dataclass
class ModelRequest:
    """What a client asks for: messages or token ids, and how to sample. None leaves a setting to the server."""

    model: str | None = None
    messages: list[Message] = field(default_factory=list)
    prompts: list[str | list[int]] = field(default_factory=list)
    """Texts or token ids that are continued as they are, instead of messages."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas in OpenAI's chat form."""
    read_calls: bool = True
    """Whether tool calls in the answer are read; with `tool_choice: none` they stay text."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    log_probs: bool = False
    return_token_ids: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """About how many characters its prompt has: what tokenizing it takes grows with them."""
        texts = [one for one in self.prompts if isinstance(one, str)]
        return sum(map(len, texts)) + sum(len(one.get("content") or "") for one in self.messages)

    def overrides(self) -> dict[str, Any]:
        """The sampling settings that the client gave."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class Turn:
    """A turn of the model, read: its thinking, its words, its tool calls, and the stop text that ended it."""

    text: str
    thinking: str = ""
    calls: Sequence[ToolCall] = ()
    call_ids: Sequence[str] = ()
    stop: str | None = None

    def message(self) -> Message:
        """As a client sends it back."""
        found: Message = {"role": "assistant", "content": self.text}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.calls:
            found["tool_calls"] = self.tool_calls(lambda given: given)
        return found

    def tool_calls(self, write: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        """The calls in OpenAI's chat form, their arguments as `write` gives them."""
        return [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": write(call.arguments)}}
            for id, call in zip(self.call_ids, self.calls, strict=True)
        ]


@dataclass
class Choice:
    """One sampled answer. `finish` is `stop`, `length` or `tool_calls`."""

    index: int
    output: Output
    turn: Turn

    @property
    def finish(self) -> str:
        return "tool_calls" if self.turn.calls else "length" if self.output.finish_reason == "length" else "stop"


@dataclass
class Answer:
    """All choices of a request. With several prompts (completions) `prompts` has those of each, choices in order."""

    id: str
    created: int
    model: str
    prompts: list[list[int]]
    decode: Callable[[list[int]], str]
    """Turns token ids into text, for the tokens of log-probs."""
    n: int = 1
    choices: list[Choice] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.output.token_ids) for choice in self.choices)

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self.n]


@dataclass
class Delta:
    """A piece of a choice, as it is streamed. The last one has the finished `choice`."""

    index: int
    text: str = ""
    thinking: str = ""
    token_ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    choice: Choice | None = None


class Fields:
    """A JSON object that is read field by field; `finish` rejects what was not read."""

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise ApiError(f"{where or 'the body'} must be a JSON object", param=where or None)
        self.where = f"{where}." if where else ""
        self.left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a field, of this type."""
        value = self.left.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < _MOST else math.inf if value > 0 else -math.inf
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(_JSON_NAMES[one] for one in kinds)
            raise self.error(name, f"must be {names}, and is {str(value)[:80]!r}")
        return value

    def number(self, name: str, low: float, high: float = float("inf"), *, whole: bool = False) -> Any:
        """A number in this range; None if it is absent."""
        value = self.take(name, int if whole else float)
        if value is not None and not low <= value <= high:
            span = f"from {low:g} to {high:g}" if high < float("inf") else f"{low:g} or more"
            raise self.error(name, f"must be {span}, and is {str(value)[:80]}")
        return value

    def require(self, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self.take(name, kind)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of texts."""
        value = self.take(name, (str, list), [])
        texts = (value,) if isinstance(value, str) else tuple(value)
        if not all(isinstance(one, str) and one for one in texts):
            raise self.error(name, "must be a text or a list of texts, none of them empty")
        return texts

    def ignore(self, *names: str) -> None:
        """Fields that do not change what is sampled."""
        for name in names:
            self.left.pop(name, None)

    def only(self, name: str, *values: Any) -> None:
        """A field of which these values alone are implemented."""
        value = self.left.pop(name, None)
        if value is not None and value not in values:
            if all(one is False or one in ({}, "") for one in values):  # they only switch the field off
                raise self._unsupported(name)
            allowed = ", ".join(map(repr, values)) or "its absence"
            raise self.error(name, f"{str(value)[:80]!r} is not supported here; supported: {allowed}")

    def finish(self) -> None:
        if self.left:
            raise self._unsupported(next(iter(self.left)))

    def _unsupported(self, name: str) -> ApiError:
        return self.error(name, "is not supported by this server; leave it out", code="unsupported_parameter")

    def error(self, name: str, why: str, code: str | None = None) -> ApiError:
        return ApiError(f"`{self.where}{name}` {why}.", param=f"{self.where}{name}", code=code)


_MOST = 1e308  # no larger integer becomes a float
_JSON_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_JSON_NAMES |= {dict: "an object"}


def take_sampling(fields: Fields, request: ModelRequest) -> None:
    """The sampling settings that all APIs name alike, and those of vLLM beside them."""
    request.temperature = fields.number("temperature", 0.0, 100.0)
    request.top_p = fields.number("top_p", 0.0, 1.0)
    request.top_k = fields.number("top_k", -1, 2**31 - 1, whole=True)
    request.min_p = fields.number("min_p", 0.0, 1.0)
    request.repetition_penalty = fields.number("repetition_penalty", 0.01, 100.0)
    request.seed = fields.number("seed", 0, 2**63 - 1, whole=True)
    request.stream = fields.take("stream", bool, False)
    request.return_token_ids = fields.take("return_token_ids", bool, False)
    ids = fields.take("stop_token_ids", list, [])
    if not are_ids(ids):
        raise fields.error("stop_token_ids", "must be token ids")
    request.stop_token_ids = tuple(ids)


def are_ids(value: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(value, list) and all(type(one) is int for one in value)  # True is an int, and no token id


def text_of(content: Any, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """A message's text: a text, or parts that are texts. Other parts (images, files) are rejected."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"`{where}` must be a text or a list of parts.", param=where)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            what = f"a part of type {kind!r}" if kind else "a part"
            raise ApiError(
                f"`{where}[{number}]`: {what} is not supported; this model reads text.", param=f"{where}[{number}]"
            )
        texts.append(part["text"])
    return "".join(texts)


def count_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def name_results(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool results have the names of the functions they come from, which some chat templates show."""
    names: dict[str, Any] = {}
    named = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = {**message, "name": names[message["tool_call_id"]]}
        named.append(message)
    return named
