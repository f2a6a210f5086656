"""OpenAI's responses: `POST /v1/responses`. Nothing is stored, so a request has its whole input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from posttrain.conversations.serving.openai_chat import error, log_probs, parse_arguments, read_tools
from posttrain.conversations.serving.requests import (
    Answer,
    Choice,
    Delta,
    Fields,
    Message,
    ModelRequest,
    take_sampling,
    text_of,
)

__all__ = ["Stream", "error", "read", "write"]

_IGNORED = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "max_tool_calls")
_ENCRYPTED, _LOG_PROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


def read(body: Any) -> ModelRequest:
    """The request of a body."""
    fields = Fields(body)
    request = ModelRequest(model=fields.take("model", str))
    if instructions := fields.take("instructions", str):
        request.messages.append({"role": "system", "content": instructions})
    given = fields.require("input", (str, list))
    if isinstance(given, str):
        request.messages.append({"role": "user", "content": given})
    else:
        _read_items(given, request.messages)
    request.tools, request.read_calls = read_tools(fields, nested=False)
    request.max_tokens = fields.number("max_output_tokens", 1, whole=True)
    wanted = fields.take("include", list, [])
    if strange := [one for one in wanted if one not in (_ENCRYPTED, _LOG_PROBS)]:
        raise fields.error("include", f"{strange[0]!r} is not supported")
    request.log_probs = _LOG_PROBS in wanted
    if "previous_response_id" in fields.left or "conversation" in fields.left:
        name = "previous_response_id" if "previous_response_id" in fields.left else "conversation"
        raise fields.error(name, "is not supported: nothing is stored here; send the whole input")
    fields.only("text", {"format": {"type": "text"}}, {})
    fields.only("reasoning", {}, *({"effort": None, "summary": one} for one in (None, "auto")))
    fields.only("truncation", "disabled")
    fields.only("background", False)
    fields.only("top_logprobs", 0)
    fields.ignore(*_IGNORED)
    take_sampling(fields, request)
    fields.finish()
    return request


def _read_items(given: list[Any], messages: list[Message]) -> None:
    """Items as messages: thinking, words and calls that stand behind each other are one turn of the model."""
    for number, one in enumerate(given):
        where = f"input[{number}]"
        item = Fields(one, where)
        kind = item.take("type", str, "message")
        item.ignore("id", "status", "phase")
        if kind == "message":
            role = item.require("role", str)
            parts = ("input_text", "output_text", "text", "refusal")
            text = text_of(item.left.pop("content", None), f"{where}.content", parts)
            if role == "assistant":
                turn = _turn(messages)
                turn["content"] += text
            elif role in ("user", "system", "developer"):
                messages.append({"role": "system" if role == "developer" else role, "content": text})
            else:
                raise item.error("role", f"is user, assistant, system or developer, and is {role!r}")
        elif kind == "reasoning":
            parts = [*item.take("summary", list, []), *item.take("content", list, [])]
            thinking = "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            if thinking:
                turn = _turn(messages)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
        elif kind == "function_call":
            name, id = item.require("name", str), item.require("call_id", str)
            arguments = parse_arguments(item.take("arguments", str, ""), f"{where}.arguments")
            call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            _turn(messages).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            id = item.require("call_id", str)
            text = text_of(item.left.pop("output", None), f"{where}.output", ("input_text", "output_text", "text"))
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
        else:
            raise item.error("type", f"{kind!r} is not supported")


def _turn(messages: list[Message]) -> Message:
    """The model's turn that an item belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def write(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The body of an answer."""
    (choice,) = answer.choices
    return _common_fields(request, answer, choice)


def _common_fields(request: ModelRequest, answer: Answer, choice: Choice | None) -> dict[str, Any]:
    """The response; without a choice, as it is when it begins."""
    cut = choice is not None and choice.finish == "length"
    root: dict[str, Any] = {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "status": "in_progress" if choice is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "output": _items(request, answer, choice) if choice else [],
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": "auto" if request.read_calls else "none",
        "tools": [{"type": "function", **one["function"]} for one in request.tools],
        "max_output_tokens": request.max_tokens,
        "previous_response_id": None,
        "usage": None,
    }
    if choice is not None:
        prompt, output = answer.prompt_tokens, len(choice.output.token_ids)
        root["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + output,
        }
        if request.return_token_ids:
            root |= {"prompt_token_ids": answer.prompts[0], "token_ids": choice.output.token_ids}
    return root


def _items(request: ModelRequest, answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    turn, items = choice.turn, list[dict[str, Any]]()
    if turn.thinking:
        items.append(_reasoning(answer, turn.thinking))
    if turn.text or not turn.calls:
        logged = log_probs(answer, choice.output.token_ids, choice.output.log_probs) if request.log_probs else []
        items.append(_message(answer, turn.text, logged))
    return items + _calls(answer, choice)


def _reasoning(answer: Answer, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content}


def _message(answer: Answer, text: str, logged: list[Any]) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logged}
    made = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": "completed"}
    return made | {"content": [part]}


def _calls(answer: Answer, choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{answer.id}_{number}",
            "type": "function_call",
            "status": "completed",
            "call_id": id,
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        }
        for number, (id, call) in enumerate(zip(choice.turn.call_ids, choice.turn.calls, strict=True))
    ]


class Stream:
    """Writes the events of a streamed answer: its items one after another, each begun, filled and done."""

    def __init__(self, request: ModelRequest, answer: Answer) -> None:
        self.request, self.answer = request, answer
        self.sequence, self.index = -1, 0
        self.text: str | None = None
        self.thinking: str | None = None

    def start(self) -> Iterator[Any]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=_common_fields(self.request, self.answer, None))

    def delta(self, piece: Delta) -> Iterator[Any]:
        if piece.thinking:
            if self.thinking is None:
                self.thinking = ""
                yield self._added(_reasoning(self.answer, "") | {"content": []})
            self.thinking += piece.thinking
            place = {"item_id": f"rs_{self.answer.id}", "output_index": self.index, "content_index": 0}
            yield self._event("response.reasoning_text.delta", **place, delta=piece.thinking)
        if piece.text or (piece.choice and self.text is None and not piece.choice.turn.calls):
            yield from self._end_thinking()
            if self.text is None:
                self.text = ""
                yield self._added(_message(self.answer, "", []) | {"content": [], "status": "in_progress"})
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                yield self._event("response.content_part.added", **self._place(), part=part)
            self.text += piece.text
            logged = log_probs(self.answer, piece.token_ids, piece.log_probs) if self.request.log_probs else []
            yield self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=logged)
        if piece.choice is not None:
            yield from self._end_thinking()
            yield from self._end_text(piece.choice)
            for item in _calls(self.answer, piece.choice):
                yield self._added(item | {"arguments": "", "status": "in_progress"})
                place = {"item_id": item["id"], "output_index": self.index}
                yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **place, **done)
                yield self._done(item)

    def end(self, answer: Answer) -> Iterator[Any]:
        response = _common_fields(self.request, answer, answer.choices[0])
        yield self._event(f"response.{response['status']}", response=response)

    def _end_thinking(self) -> Iterator[Any]:
        if self.thinking:
            text, self.thinking = self.thinking, ""
            place = {"item_id": f"rs_{self.answer.id}", "output_index": self.index, "content_index": 0}
            yield self._event("response.reasoning_text.done", **place, text=text)
            yield self._done(_reasoning(self.answer, text))

    def _end_text(self, choice: Choice) -> Iterator[Any]:
        if self.text is not None:
            item = _message(self.answer, choice.turn.text, [])
            yield self._event("response.output_text.done", **self._place(), text=choice.turn.text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=item["content"][0])
            yield self._done(item)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self.answer.id}", "output_index": self.index, "content_index": 0}

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        return self._event("response.output_item.added", output_index=self.index, item=item)

    def _done(self, item: dict[str, Any]) -> dict[str, Any]:
        made = self._event("response.output_item.done", output_index=self.index, item=item)
        self.index += 1
        return made

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        self.sequence += 1
        return {"type": kind, "sequence_number": self.sequence, **more}
