"""OpenAI's completions: `POST /v1/completions`, texts or token ids that are continued as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from posttrain.conversations.serving import openai_chat
from posttrain.conversations.serving.openai_chat import error, read_shared_options, usage
from posttrain.conversations.serving.requests import Answer, ApiError, Choice, Delta, Fields, ModelRequest, are_ids

__all__ = ["Stream", "error", "read", "write"]


def read(body: Any) -> ModelRequest:
    """The request of a body."""
    fields = Fields(body)
    request = ModelRequest(model=fields.take("model", str), read_calls=False)
    request.prompts = _prompts(fields.require("prompt", (str, list)))
    request.max_tokens = fields.number("max_tokens", 1, whole=True) or 16  # OpenAI's default
    wanted = fields.take("logprobs", (int, bool))
    if wanted is not None and wanted not in (0, 1):
        raise fields.error("logprobs", "is 0 or 1: the log-prob of each sampled token is known, others are not")
    request.log_probs = wanted is not None and wanted is not False
    fields.ignore("user")
    fields.only("echo", False)
    fields.only("suffix", "")
    fields.only("best_of", 1)
    read_shared_options(fields, request)
    return request


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if given and are_ids(given):
        return [given]
    for one in given:
        if not (isinstance(one, str) or are_ids(one)):
            raise ApiError("`prompt` is a text, a list of token ids, or a list of those.", param="prompt")
    if not given:
        raise ApiError("`prompt` is empty.", param="prompt")
    return given


def _common_fields(answer: Answer) -> dict[str, Any]:
    return {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created, "model": answer.model}


def write(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The body of an answer."""
    choices = [_choice(request, answer, choice) for choice in answer.choices]
    return _common_fields(answer) | {"choices": choices, "usage": usage(answer)}


def _choice(request: ModelRequest, answer: Answer, choice: Choice) -> dict[str, Any]:
    output = choice.output
    made: dict[str, Any] = {"index": choice.index, "text": choice.turn.text, "finish_reason": choice.finish}
    made["logprobs"] = _log_probs(answer, output.token_ids, output.log_probs) if request.log_probs else None
    if request.return_token_ids:
        made |= {"token_ids": output.token_ids, "prompt_token_ids": answer.prompt_of(choice.index)}
    return made


def _log_probs(answer: Answer, ids: Any, values: Any) -> dict[str, Any]:
    texts, offsets = [answer.decode([id]) for id in ids], [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": [float(one) for one in values],
        "top_logprobs": None,
        "text_offset": offsets[:-1],
    }


class Stream(openai_chat.Stream):
    """Writes the events of a streamed answer."""

    def delta(self, piece: Delta) -> Iterator[Any]:
        choice: dict[str, Any] = {"index": piece.index, "text": piece.text, "logprobs": None}
        choice["finish_reason"] = piece.choice.finish if piece.choice else None
        if self.request.log_probs:
            choice["logprobs"] = _log_probs(self.answer, piece.token_ids, piece.log_probs)
        if self.request.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
            if piece.index not in self.begun:
                choice["prompt_token_ids"] = self.answer.prompt_of(piece.index)
        self.begun.add(piece.index)
        yield self._chunk([choice])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return _common_fields(self.answer) | {"choices": choices}
