"""Anthropic's messages: `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.serving.openai_chat import tool_schema
from posttrain.conversations.serving.requests import (
    Answer,
    ApiError,
    Choice,
    ContextFull,
    Delta,
    Fields,
    Message,
    ModelRequest,
    take_sampling,
    text_of,
)


def read(body: Any, *, counts: bool = False) -> ModelRequest:
    """The request of a body. `counts`: only its tokens are counted."""
    fields = Fields(body)
    request = ModelRequest(model=fields.require("model", str))
    if system := text_of(fields.left.pop("system", None), "system"):
        request.messages.append({"role": "system", "content": system})
    for number, one in enumerate(fields.require("messages", list)):
        request.messages += _read_message(one, f"messages[{number}]")
    request.tools, request.read_calls = _tools(fields)
    if not counts:
        request.max_tokens = fields.number("max_tokens", 1, whole=True)
        if request.max_tokens is None:
            raise fields.error("max_tokens", "is missing")
    request.stop = fields.texts("stop_sequences")
    fields.only("thinking", {"type": "disabled"}, {"type": "adaptive"})
    fields.ignore("metadata", "service_tier", "cache_control")
    take_sampling(fields, request)
    fields.finish()
    return request


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], bool]:
    tools = []
    for number, one in enumerate(fields.take("tools", list, [])):
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in (None, "custom"):
            raise ApiError(f"`tools[{number}].type`: {kind!r} is not supported; give tools with an input_schema.")
        tools.append(tool_schema(one, f"tools[{number}]", "input_schema"))
    choice = Fields(fields.take("tool_choice", dict, {"type": "auto"}), "tool_choice")
    kind = choice.take("type", str, "auto")
    if kind not in ("auto", "none"):
        raise choice.error("type", "is 'auto' or 'none' here: the model itself decides whether it calls a tool")
    choice.only("disable_parallel_tool_use", False)
    return tools, kind == "auto"


def _read_message(given: Any, where: str) -> Iterator[Message]:
    """The messages of one of Anthropic's: tool results stand beside the user's words in it."""
    fields = Fields(given, where)
    role, content = fields.require("role", str), fields.require("content", (str, list))
    if role not in ("user", "assistant", "system"):
        raise fields.error("role", f"is user or assistant, and is {role!r}")
    fields.finish()
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    words, thinking, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, one in enumerate(content):
        block = Fields(one, f"{where}.content[{number}]")
        kind = block.require("type", str)
        if kind == "text":
            words.append(block.require("text", str))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thinking.append(block.take("thinking", str, ""))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.require("name", str), "arguments": block.take("input", dict, {})}
            calls.append({"id": block.require("id", str), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            if words:  # what stood before the result was said before it
                yield {"role": role, "content": "".join(words)}
                words = []
            text = text_of(block.left.pop("content", None), f"{where}.content[{number}].content")
            yield {"role": "tool", "tool_call_id": block.require("tool_use_id", str), "content": text}
        else:
            raise block.error("type", f"{kind!r} is not supported in a message of the {role}")
    message: Message = {"role": role, "content": "".join(words)}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    if words or thinking or calls:
        yield message


_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.finish == "stop" and choice.turn.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.turn.stop}
    return {"stop_reason": _REASONS[choice.finish], "stop_sequence": None}


def write(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The body of an answer."""
    (choice,) = answer.choices
    turn, content = choice.turn, list[dict[str, Any]]()
    if turn.thinking:
        content.append({"type": "thinking", "thinking": turn.thinking, "signature": ""})
    if turn.text or not turn.calls:
        content.append({"type": "text", "text": turn.text})
    content += [
        {"type": "tool_use", "id": id, "name": call.name, "input": call.arguments}
        for id, call in zip(turn.call_ids, turn.calls, strict=True)
    ]
    made = _common_fields(answer) | {"content": content} | _stop(choice)
    made["usage"] = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.output_tokens}
    if request.return_token_ids:
        made |= {"prompt_token_ids": answer.prompts[0], "token_ids": choice.output.token_ids}
    return made


def _common_fields(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


class Stream:
    """Writes the events of a streamed answer: blocks of thinking, text and tool use, one after another."""

    def __init__(self, request: ModelRequest, answer: Answer) -> None:
        self.request, self.answer = request, answer
        self.number, self.open = -1, ""

    def start(self) -> Iterator[Any]:
        usage = {"input_tokens": self.answer.prompt_tokens, "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": _common_fields(self.answer) | empty}

    def delta(self, piece: Delta) -> Iterator[Any]:
        if piece.thinking:
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            yield self._more({"type": "thinking_delta", "thinking": piece.thinking})
        if piece.text:
            yield from self._begin({"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": piece.text})
        if piece.choice is None:
            return
        turn = piece.choice.turn
        for id, call in zip(turn.call_ids, turn.calls, strict=True):
            yield from self._end()
            yield from self._begin({"type": "tool_use", "id": id, "name": call.name, "input": {}})
            given = json.dumps(call.arguments, ensure_ascii=False)
            yield self._more({"type": "input_json_delta", "partial_json": given})
        yield from self._end()
        usage = {"output_tokens": len(piece.choice.output.token_ids)}
        yield {"type": "message_delta", "delta": _stop(piece.choice), "usage": usage}

    def end(self, answer: Answer) -> Iterator[Any]:
        yield {"type": "message_stop"}

    def _begin(self, block: dict[str, Any]) -> Iterator[Any]:
        if self.open == block["type"]:
            return
        yield from self._end()
        self.number, self.open = self.number + 1, block["type"]
        yield {"type": "content_block_start", "index": self.number, "content_block": block}

    def _more(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self.number, "delta": delta}

    def _end(self) -> Iterator[Any]:
        if self.open:
            self.open = ""
            yield {"type": "content_block_stop", "index": self.number}


_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


def error(problem: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    words = str(problem)
    if isinstance(problem, ContextFull):
        words = f"prompt is too long: {problem.tokens} tokens > {problem.most - 1} maximum"
    return {"type": "error", "error": {"type": kind, "message": words}}
