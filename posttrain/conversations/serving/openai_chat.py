"""OpenAI's chat completions: `POST /v1/chat/completions`, with vLLM's `return_token_ids`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from posttrain.conversations.serving.requests import (
    Answer,
    ApiError,
    Choice,
    Delta,
    Fields,
    Message,
    ModelRequest,
    take_sampling,
    text_of,
)

_IGNORED = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read(body: Any) -> ModelRequest:
    """The request of a body; ApiError names the field that is wrong."""
    fields = Fields(body)
    request = ModelRequest(model=fields.take("model", str))
    request.messages = read_messages(fields.require("messages", list))
    request.tools, request.read_calls = read_tools(fields)
    most = fields.number("max_tokens", 1, whole=True)
    request.max_tokens = fields.number("max_completion_tokens", 1, whole=True) or most
    request.log_probs = fields.take("logprobs", bool, False)
    request.template_options = fields.take("chat_template_kwargs", dict, {})
    fields.only("top_logprobs", 0)
    fields.ignore(*_IGNORED)
    fields.only("response_format", {"type": "text"})
    read_shared_options(fields, request)
    return request


def read_shared_options(fields: Fields, request: ModelRequest) -> None:
    """Read the options that chat and text completions share: the number of answers, sampling and streaming."""
    request.n = fields.number("n", 1, 128, whole=True) or 1
    request.stop = fields.texts("stop")
    options = Fields(fields.left.pop("stream_options", None) or {}, "stream_options")
    request.include_usage = options.take("include_usage", bool, False)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0)
    fields.only("logit_bias", {})
    take_sampling(fields, request)
    fields.finish()


def read_messages(given: list[Any]) -> list[Message]:
    """Messages with texts as content and parsed arguments."""
    if not given:
        raise ApiError("`messages` is empty.", param="messages")
    return [_read_message(one, f"messages[{number}]") for number, one in enumerate(given)]


def _read_message(given: Any, where: str) -> Message:
    if (plain := _plain_message(given)) is not None:
        return plain
    fields = Fields(given, where)
    role = fields.require("role", str)
    if role not in _ROLES:
        raise fields.error("role", f"is one of {', '.join(_ROLES)}, and is {role!r}")
    message: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(fields.left.pop("content", None), f"{where}.content", ("text", "refusal")),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := fields.take(name, str):
            message[name] = value
    if role == "tool" and "tool_call_id" not in message:
        raise fields.error("tool_call_id", "is missing: it names the call that this message answers")
    if calls := fields.take("tool_calls", list, []):
        message["tool_calls"] = [_read_call(one, f"{where}.tool_calls[{n}]") for n, one in enumerate(calls)]
    # What clients send back of an answer besides its words: null, empty, or a second copy.
    fields.ignore("refusal", "annotations", "audio", "function_call", "reasoning", "parsed", "token_ids")
    fields.finish()
    return message


def _plain_message(given: Any) -> Message | None:
    """A message of nothing but a role and a text, as nearly all are: a history has many, and comes with every turn."""
    if not isinstance(given, dict):
        return None
    role, content = given.get("role"), given.get("content")
    if not isinstance(content, str) or role not in ("system", "user", "assistant"):
        return None
    if len(given) > 2 and any(value is not None for key, value in given.items() if key not in ("role", "content")):
        return None
    return {"role": role, "content": content}


def _read_call(given: Any, where: str) -> dict[str, Any]:
    fields = Fields(given, where)
    function = Fields(fields.require("function", dict), f"{where}.function")
    arguments = parse_arguments(function.take("arguments", (str, dict), {}), f"{where}.function.arguments")
    call = {"id": fields.require("id", str), "type": "function"}
    return call | {"function": {"name": function.require("name", str), "arguments": arguments}}


def parse_arguments(given: str | dict[str, Any], where: str) -> dict[str, Any]:
    """A call's arguments, which come as JSON text."""
    try:
        value = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        raise ApiError(f"`{where}` is not JSON.", param=where) from None
    if not isinstance(value, dict):
        raise ApiError(f"`{where}` must be a JSON object.", param=where)
    return value


def read_tools(fields: Fields, *, nested: bool = True) -> tuple[list[dict[str, Any]], bool]:
    """(schemas, whether calls are read). `nested`: what a tool is stands in its field `function`."""
    tools = []
    for number, one in enumerate(fields.take("tools", list, [])):
        where = f"tools[{number}]"
        tool = Fields(one, where)
        if (kind := tool.take("type", str, "function")) != "function":
            raise tool.error("type", f"{kind!r} is not supported; this server has tools of type 'function'")
        given = tool.require("function", dict) if nested else tool.left
        tools.append(tool_schema(given, f"{where}.function" if nested else where))
    choice = fields.take("tool_choice", (str, dict), "auto")
    if choice not in ("auto", "none"):
        raise fields.error("tool_choice", "is 'auto' or 'none' here: the model itself decides whether it calls a tool")
    fields.only("parallel_tool_calls", True)
    return tools, choice == "auto"


def tool_schema(given: Any, where: str, parameters: str = "parameters") -> dict[str, Any]:
    """A tool as chat templates show it."""
    fields = Fields(given, where)
    function: dict[str, Any] = {
        "name": fields.require("name", str),
        "description": fields.take("description", str, ""),
        "parameters": fields.take(parameters, dict, {"type": "object", "properties": {}}),
    }
    fields.ignore("strict", "type", "cache_control", "defer_loading")
    fields.finish()
    return {"type": "function", "function": function}


def write(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The body of an answer."""
    root: dict[str, Any] = _common_fields(answer, "chat.completion") | {"usage": usage(answer)}
    if request.return_token_ids:
        root["prompt_token_ids"] = answer.prompts[0]
    root["choices"] = [_choice(request, answer, choice) for choice in answer.choices]
    return root


def _common_fields(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _choice(request: ModelRequest, answer: Answer, choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.turn.text or None, "refusal": None}
    if not choice.turn.calls:
        message["content"] = choice.turn.text
    if choice.turn.thinking:
        message["reasoning_content"] = choice.turn.thinking
    if choice.turn.calls:
        message["tool_calls"] = _calls(choice)
    made: dict[str, Any] = {"index": choice.index, "message": message, "finish_reason": choice.finish, "logprobs": None}
    if request.log_probs:
        made["logprobs"] = {"content": log_probs(answer, choice.output.token_ids, choice.output.log_probs)}
    if request.return_token_ids:
        made |= {"token_ids": choice.output.token_ids, "prompt_token_ids": answer.prompt_of(choice.index)}
    return made


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return choice.turn.tool_calls(partial(json.dumps, ensure_ascii=False))


def log_probs(answer: Answer, ids: Any, values: Any) -> list[dict[str, Any]]:
    """One entry per token, in the order of the ids."""
    texts = [answer.decode([id]) for id in ids]
    return [
        {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
    ]


def usage(answer: Answer) -> dict[str, int]:
    prompt, output = answer.prompt_tokens, answer.output_tokens
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


class Stream:
    """Writes the events of a streamed answer."""

    def __init__(self, request: ModelRequest, answer: Answer) -> None:
        self.request, self.answer = request, answer
        self.begun: set[int] = set()

    def start(self) -> Iterator[Any]:
        return iter(())

    def delta(self, piece: Delta) -> Iterator[Any]:
        delta: dict[str, Any] = {} if piece.index in self.begun else {"role": "assistant", "content": ""}
        if piece.text:
            delta["content"] = piece.text
        if piece.thinking:
            delta["reasoning_content"] = piece.thinking
        if piece.choice is not None and piece.choice.turn.calls:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(_calls(piece.choice))]
        if delta or piece.token_ids:
            choice: dict[str, Any] = {"index": piece.index, "delta": delta, "finish_reason": None, "logprobs": None}
            if self.request.log_probs:
                choice["logprobs"] = {"content": log_probs(self.answer, piece.token_ids, piece.log_probs)}
            if self.request.return_token_ids:
                choice["token_ids"] = list(piece.token_ids)
            first = not self.begun and self.request.return_token_ids
            self.begun.add(piece.index)
            yield self._chunk([choice]) | ({"prompt_token_ids": self.answer.prompts[0]} if first else {})
        if piece.choice is not None:
            ended = {"index": piece.index, "delta": {}, "finish_reason": piece.choice.finish, "logprobs": None}
            yield self._chunk([ended])

    def end(self, answer: Answer) -> Iterator[Any]:
        if self.request.include_usage:
            yield self._chunk([]) | {"usage": usage(answer)}
        yield "[DONE]"

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return _common_fields(self.answer, "chat.completion.chunk") | {"choices": choices}


def error(problem: ApiError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = {401: "authentication_error", 404: "not_found_error"}.get(problem.status, "invalid_request_error")
    if problem.status >= 500:
        kind = "server_error"
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}
