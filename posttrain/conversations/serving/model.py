"""Answers requests with a model: messages become a prompt, the engine samples, and turns are read.

Where the tokens come from is a `Sampler`: an engine of this process, or the trainer's rollout (`programs.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from posttrain.conversations.formats.base import CallFormat
from posttrain.conversations.serving.requests import (
    Answer,
    ApiError,
    Choice,
    ContextFull,
    Delta,
    Message,
    ModelRequest,
    count_calls,
    name_results,
)
from posttrain.conversations.serving.turns import TurnReader, TurnStream, decode
from posttrain.conversations.templates import MessageTemplate, NoTemplate
from posttrain.conversations.thinking import EarlierThinking
from posttrain.rollout.base import Output, Sampling

_COLDEST = 1e-5
"""Below this temperature the most likely token is taken: logits that are divided by it may overflow."""
_MOST_TEMPLATES = 100
OnDelta = Callable[[Delta], None]


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue. `before` is what a ledger has matched them to."""

    ids: list[int]
    before: Any = None


class Sampler(Protocol):
    """Samples responses. Cancelling a call aborts it."""

    async def sample(
        self, prompt: Prompt, sampling: Sampling, seed: int | None, on_progress: Callable[[Output], None] | None
    ) -> Output: ...


class Ledger(Protocol):
    """Remembers what was sampled, so that messages that a client sends back keep their token ids (`ledger.py`)."""

    def prompt(self, request: ModelRequest, render: Callable[[], list[int]]) -> Prompt: ...

    def add(self, prompt: Prompt, request: ModelRequest, choice: Choice) -> None: ...


@dataclass
class Pending:
    """A request that was checked, and its answer as far as it is known."""

    request: ModelRequest
    prompts: list[Prompt]
    samplings: list[Sampling]
    answer: Answer
    ledger: Ledger | None


class ServedModel:
    """A model by its name, with its chat template, its format of tool calls (None: tools are rejected) and limits."""

    def __init__(
        self,
        name: str,
        template: MessageTemplate,
        call_format: CallFormat,
        sampling: Sampling,
        *,
        max_model_len: int,
        vocabulary: int,
        no_tools: str | None = None,
        any_name: bool = False,
        thinking: EarlierThinking | None = None,
    ) -> None:
        self.name, self.template, self.format, self.sampling = name, template, call_format, sampling
        self.max_model_len, self.vocabulary, self.no_tools = max_model_len, vocabulary, no_tools
        self.any_name, self.created = any_name, int(time.time())
        self.thinking = thinking
        """Drops the thinking of earlier turns; None where it stays in the history."""
        # What clients must not set: the server itself calls the template with these.
        call = inspect.signature(template.tokenizer.apply_chat_template).parameters
        self._settled = {"messages", "opens", "self", *call} - {"documents"}
        self._templates = dict[str, MessageTemplate]()
        self._special = sorted(template.untrusted.special, key=len, reverse=True)

    # -- prompts --------------------------------------------------------------------------------------------------
    def prompts(self, request: ModelRequest, ledger: Ledger | None = None) -> list[Prompt]:
        """The prompts of a request: its own texts and ids, or its messages by the chat template."""
        if request.tools and self.no_tools:
            raise ApiError(f"`tools` cannot be used with this model: {self.no_tools}", param="tools")
        if request.prompts:
            return [Prompt(self._ids(one)) for one in request.prompts]
        if ledger is None:
            return [Prompt(self.render(request))]
        return [ledger.prompt(request, lambda: self.render(request))]

    def render(self, request: ModelRequest, *, opens: bool = True) -> list[int]:
        """Messages as a prompt, by the chat template."""
        shown, template = [self._shown(message) for message in request.messages], self.template_of(request)
        try:
            return template.untrusted.ids(
                shown, lambda given: template.render(given, opens=opens, tools=request.tools or None)
            )
        except NoTemplate as error:
            raise ApiError(str(error), param="messages") from error

    def template_of(self, request: ModelRequest) -> MessageTemplate:
        """The chat template with the variables that a request sets."""
        if not request.template_options:
            return self.template
        key = json.dumps(request.template_options, sort_keys=True)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:  # clients choose the values
                self._templates.clear()
            template = self._templates[key] = self.template.with_options(request.template_options)
        return template

    def _shown(self, message: Message) -> Message:
        """The message in the form that the chat template takes."""
        if not message.get("tool_calls") or self.template.calls is None:
            return message
        form = self.template.calls
        pairs = [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]
        made = dict(form.message(pairs))
        for call, given in zip(made["tool_calls"], message["tool_calls"], strict=True):
            call["id"] = given["id"]
        return {**message, **made, "content": message.get("content") or form.content}

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.template.untrusted.encode(prompt, special=True)
        if strange := [one for one in prompt if not 0 <= one < self.vocabulary]:
            raise self._no_token(strange[0])
        return list(prompt)

    # -- answers --------------------------------------------------------------------------------------------------
    def begin(self, request: ModelRequest, ledger: Ledger | None = None) -> Pending:
        """Checks a request and makes its prompts; whatever is wrong with it is raised here, before a stream begins."""
        self.check(request)
        request.messages = name_results(request.messages)
        prompts = self.prompts(request, ledger)
        samplings = [self._sampling(request, prompt.ids) for prompt in prompts]
        answer = Answer(
            uuid.uuid4().hex,
            int(time.time()),
            self.name,
            [prompt.ids for prompt in prompts],
            partial(decode, self.template.tokenizer),
            request.n,
        )
        return Pending(request, prompts, samplings, answer, ledger)

    async def finish(self, pending: Pending, sampler: Sampler, on_delta: OnDelta | None = None) -> Answer:
        """Samples `n` choices for each prompt. `on_delta` gets their pieces meanwhile."""
        count = pending.request.n * len(pending.prompts)
        calls = [self._choice(pending, index, sampler, on_delta) for index in range(count)]
        # One choice, as nearly all requests want, needs no task of its own.
        pending.answer.choices = [await calls[0]] if count == 1 else await _gather(calls)
        return pending.answer

    async def _choice(self, pending: Pending, index: int, sampler: Sampler, on_delta: OnDelta | None) -> Choice:
        request, place = pending.request, index // pending.request.n
        prompt, sampling = pending.prompts[place], pending.samplings[place]
        seed = None if request.seed is None else request.seed + index % request.n
        stream = TurnStream(self._reader(request, prompt.ids), index)
        known = 0

        def on_progress(output: Output) -> None:
            nonlocal known
            if on_delta is not None and len(output.token_ids) > known:
                ids, log_probs = output.token_ids[known:], list(output.log_probs[known:])
                known = len(output.token_ids)
                on_delta(stream.feed(ids, log_probs))

        output = await sampler.sample(prompt, sampling, seed, on_progress if on_delta else None)
        delta = stream.finish(output)
        assert delta.choice is not None
        if pending.ledger is not None:
            pending.ledger.add(prompt, request, delta.choice)
        if on_delta is not None:
            on_delta(delta)
        return delta.choice

    def _reader(self, request: ModelRequest, prompt_ids: Sequence[int]) -> TurnReader:
        tools = {one["function"]["name"]: one["function"] for one in request.tools} if request.read_calls else {}
        before = count_calls(request.messages)
        return TurnReader.of(
            self.template.tokenizer,
            None if request.prompts else self.format,
            self._special,
            prompt_ids,
            stop=request.stop,
            tools=tools,
            calls_before=before,
        )

    def _sampling(self, request: ModelRequest, prompt_ids: Sequence[int]) -> Sampling:
        room = self.max_model_len - len(prompt_ids)
        if room < 1 or not prompt_ids:
            raise ContextFull(len(prompt_ids), self.max_model_len) if prompt_ids else ApiError("The prompt is empty.")
        given = request.overrides()
        given.pop("seed", None)
        if (temperature := given.pop("temperature", None)) is not None:
            greedy = temperature < _COLDEST
            given |= {"greedy": greedy, "temperature": 1.0 if greedy else temperature}
        if given.get("top_p") == 0:  # the most likely token always counts
            given |= {"top_p": 1.0, "top_k": 1}
        stop = (*self.sampling.stop, *request.stop)
        if request.tools and request.read_calls:
            stop = (*stop, *self.format.stop)
        return replace(
            self.sampling,
            max_tokens=min(room, request.max_tokens or room),
            stop=stop,
            stop_token_ids=(*self.sampling.stop_token_ids, *request.stop_token_ids),
            **given,
        )

    def check(self, request: ModelRequest) -> None:
        """Rejects what is wrong with a request whatever its prompt is."""
        self.check_name(request.model)
        if strange := [one for one in request.stop_token_ids if not 0 <= one < self.vocabulary]:
            raise self._no_token(strange[0], "stop_token_ids")
        if wrong := [name for name in request.template_options if name in self._settled]:
            raise ApiError(
                f"`chat_template_kwargs.{wrong[0]}` is no variable of a chat template; leave it out.",
                param="chat_template_kwargs",
            )

    def _no_token(self, id: int, param: str | None = None) -> ApiError:
        return ApiError(f"token id {str(id)[:80]} is not in the vocabulary of {self.vocabulary} tokens", param=param)

    def check_name(self, name: str | None) -> None:
        """Another model's name is an error: its client expects other answers. In a run programs may name any model."""
        if name is not None and name != self.name and not self.any_name:
            raise ApiError(
                f"The model `{name}` does not exist here; this server has `{self.name}`.",
                status=404,
                param="model",
                code="model_not_found",
            )


async def _gather(calls: Sequence[Any]) -> list[Any]:
    """All results; the others are cancelled where one fails, so that no sample is made that no client reads."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
