"""Token ids in and out: `POST /inference/v1/generate`, as vLLM has it, and `POST /tokenize`."""

from __future__ import annotations

from typing import Any

from posttrain.conversations.serving.openai_chat import error, read_messages, read_tools
from posttrain.conversations.serving.requests import Answer, Fields, ModelRequest, are_ids, take_sampling

__all__ = ["error", "read", "read_tokenize", "write"]


def read(body: Any) -> ModelRequest:
    """The request of a body: `token_ids` and vLLM's `sampling_params`."""
    fields = Fields(body)
    request = ModelRequest(model=fields.take("model", str), read_calls=False)
    ids = fields.require("token_ids", list)
    if not ids or not are_ids(ids):
        raise fields.error("token_ids", "must be a list of token ids, not empty")
    request.prompts = [ids]
    params = Fields(fields.take("sampling_params", dict, {}), "sampling_params")
    request.n = params.number("n", 1, 128, whole=True) or 1
    request.max_tokens = params.number("max_tokens", 1, whole=True)
    request.stop = params.texts("stop")
    if (params.take("logprobs", int) or 0) > 1:
        raise params.error("logprobs", "is 0 or 1: the log-prob of each sampled token is known, others are not")
    request.log_probs = True
    params.ignore("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "output_kind")
    take_sampling(params, request)
    params.finish()
    fields.only("stream", False)
    fields.ignore("request_id", "priority", "cache_salt")
    fields.finish()
    return request


def write(request: ModelRequest, answer: Answer) -> dict[str, Any]:
    """The body of an answer: each token is named `token_id:N`, which is what clients of this route check."""
    choices = []
    for choice in answer.choices:
        ids, values = choice.output.token_ids, choice.output.log_probs
        content = [{"token": f"token_id:{id}", "logprob": float(value)} for id, value in zip(ids, values, strict=True)]
        choices.append(
            {
                "index": choice.index,
                "token_ids": ids,
                "finish_reason": "length" if choice.output.finish_reason == "length" else "stop",
                "logprobs": {"content": content},
            }
        )
    return {"request_id": answer.id, "model": answer.model, "choices": choices}


def read_tokenize(body: Any) -> tuple[ModelRequest, bool]:
    """(the request whose prompt is tokenized, whether the model's turn is opened behind messages)."""
    fields = Fields(body)
    request = ModelRequest(model=fields.take("model", str))
    opens = fields.take("add_generation_prompt", bool, True)
    text = fields.take("prompt", str)
    if text is not None:
        request.prompts = [text]
    else:
        request.messages = read_messages(fields.require("messages", list))
        request.tools, _ = read_tools(fields)
        request.template_options = fields.take("chat_template_kwargs", dict, {})
    fields.only("continue_final_message", False)
    fields.ignore("add_special_tokens", "return_token_strs")
    fields.finish()
    return request, opens
