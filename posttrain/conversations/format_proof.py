"""The format of a run's tool calls, proved by a round trip: the chat template writes a call, and the format reads it.

A format that does not fit the model is hard to notice later: right calls would be answered as wrong ones, or never be
seen. So a run starts only with a format that reads what its chat template writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from posttrain.conversations.formats.base import AUTO, FORMATS, CallFormat, without_thinking
from posttrain.conversations.settings import TURNS_KEY as KEY
from posttrain.conversations.templates import CallMessages, MessageTemplate, NoTemplate
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import ToolCall
from posttrain.conversations.untrusted_text import Message
from posttrain.errors import UserError

FALLBACK = "hermes"
"""For chat templates that do not write tool calls, but show them in these tags."""
_ARGUMENTS = {"text": "two words", "count": 3, "flag": True, "items": [1, 2]}
_PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "A text."},
        "count": {"type": "integer", "description": "A number."},
        "flag": {"type": "boolean", "description": "A choice."},
        "items": {"type": "array", "items": {"type": "integer"}, "description": "Numbers."},
    },
    "required": list(_ARGUMENTS),
}
_CALL = ToolCall("probe_tool", _ARGUMENTS)
_SCHEMA = {
    "type": "function",
    "function": {"name": _CALL.name, "description": "Proves a format.", "parameters": _PARAMETERS},
}
_QUESTION = {"role": "user", "content": "1f6a9c27e4?"}
_SHOWN = 300


class WrongFormat(UserError):
    """The chosen format does not read what the chat template writes."""


@dataclass
class Proof:
    """What the round trips of a chat template showed."""

    forms: dict[str, CallMessages] = field(default_factory=dict)
    """Formats that read the call, with the form of messages that the template takes."""
    written: str = ""
    """The turn as the template wrote it; empty if it does not write calls."""
    shown: str | None = None
    """The format whose calls the prompt describes."""
    no_calls: str = ""
    """Why the template takes no message with a call; empty if it takes one."""
    no_results: str = ""
    """Why the template takes no results behind a call that was read."""


def prove_formats(template: MessageTemplate) -> Proof:
    """Tries every format on a chat template."""
    proof, refusals, turns = Proof(), list[str](), _Turns(template)
    for name, form in FORMATS.items():
        for messages in _messages_of(form):
            try:
                turn = turns.write(messages)
            except NoTemplate as error:
                refusals.append(str(error))
                continue
            proof.written = proof.written or (turn if _CALL.name in turn else "")
            if not _reads(form, turn):
                continue
            try:
                proof.forms[name] = _prove_results(template, messages)
                break
            except (NoTemplate, ValueError) as error:  # ValueError: the template left out the call
                proof.no_results = proof.no_results or str(error)
    if not proof.written:
        proof.shown = _shown_format(template)
        proof.no_calls = refusals[0] if len(refusals) == sum(len(_messages_of(one)) for one in FORMATS.values()) else ""
    return proof


def choose_format(template: MessageTemplate, wanted: str) -> tuple[str, str]:
    """(the format of the run, a note for the user). `template` renders tool results in that format from now on."""
    proof = prove_formats(template)
    fitting = ", ".join(proof.forms)
    if wanted in proof.forms or (wanted == AUTO and proof.forms):
        name = wanted if wanted in proof.forms else next(iter(proof.forms))
        template.calls = proof.forms[name]
        return name, ""
    if not proof.written:
        name = proof.shown if wanted == AUTO else wanted
        does = f"rejects messages with tool calls ({proof.no_calls})" if proof.no_calls else "does not write tool calls"
        if name is None:
            raise WrongFormat(
                f"the chat template {does}, and its prompt shows no known format, so nothing says how the model "
                f"writes them ({KEY}.format=auto).\n"
                f"  known:  {', '.join(FORMATS)}\n"
                f"  to do:  name the format of the model's calls ({KEY}.format=NAME), or give the tokenizer a chat "
                "template that writes calls (model.tokenizer_path)"
            )
        return name, (
            f"note: the chat template {does}, so nothing proves that the model writes them as "
            f"{KEY}.format={name} reads them."
        )
    written = proof.written.strip()[:_SHOWN]
    if proof.forms:
        raise WrongFormat(
            f"{KEY}.format={wanted} does not read the tool calls of this model. Its chat template writes:\n{written}\n"
            f"  to do:  set {KEY}.format={fitting}, or leave it out: auto finds it"
        )
    if proof.no_results:
        raise WrongFormat(
            f"the chat template shows no tool results behind a call: {proof.no_results}\n{written}\n"
            "  to do:  give the tokenizer another chat template (model.tokenizer_path)"
        )
    raise WrongFormat(
        f"no format of tool calls reads what the chat template writes ({KEY}.format={wanted}):\n{written}\n"
        f"  known:  {', '.join(FORMATS)}\n"
        "  to do:  write the format as a file in posttrain/conversations/formats, or give the tokenizer a chat "
        "template that writes calls in a known one (model.tokenizer_path)"
    )


def find_format(template: MessageTemplate, wanted: str, say: Callable[[str], None]) -> tuple[str, str | None]:
    """(the format of tool calls, why tools cannot be used), where clients decide whether there are tools: a model that
    cannot be given any is served all the same."""
    if not getattr(template.tokenizer, "chat_template", None):
        return FALLBACK, "the tokenizer has no chat template"
    try:
        name, note = choose_format(template, wanted)
    except WrongFormat as error:
        return FALLBACK, str(error).partition("\n")[0]
    if note:
        say(note)
    return name, None


def _messages_of(form: CallFormat) -> list[CallMessages]:
    """The forms of messages to try, the most common one first."""
    contents, as_texts = ("", None), (False, True)
    return [CallMessages(form, content, as_text, tools=[_SCHEMA]) for content in contents for as_text in as_texts]


class _Turns:
    """The model's turns with the call, as the template writes them. Most formats have the same messages, which are
    rendered once: a run with tools waited for 270 renderings."""

    def __init__(self, template: MessageTemplate) -> None:
        self.template, self._written = template, dict[str, str | NoTemplate]()

    def write(self, messages: CallMessages) -> str:
        """NoTemplate if the template rejects the message."""
        message = messages.message([(_CALL.name, _ARGUMENTS)])
        if (key := json.dumps(message)) not in self._written:
            try:
                self._written[key] = self._render(message)
            except NoTemplate as error:
                self._written[key] = error
        if isinstance(written := self._written[key], NoTemplate):
            raise written
        return written

    def _render(self, message: Message) -> str:
        text = self.template.render([_QUESTION, message], opens=False, tools=[_SCHEMA])
        for beginning in self._beginnings:
            if text.startswith(beginning):
                return text[len(beginning) :]
        return text.rpartition(str(_QUESTION["content"]))[2]

    @cached_property
    def _beginnings(self) -> tuple[str, str, str]:
        prompt = self.template.render([_QUESTION], opens=True, tools=[_SCHEMA])
        return prompt, without_thinking(prompt), without_thinking(prompt).rstrip()


def _shown_format(template: MessageTemplate) -> str | None:
    """The format of the example that the prompt gives to the model. Hermes's is none that can be read."""
    try:
        prompt = template.render([_QUESTION], opens=True, tools=[_SCHEMA])
    except NoTemplate:
        return None
    readable = [name for name, form in FORMATS.items() if any(isinstance(one, ToolCall) for one in form.read(prompt))]
    return readable[0] if readable else FALLBACK if FORMATS[FALLBACK].opening in prompt else None


def _reads(form: CallFormat, turn: str) -> bool:
    calls = form.read(turn)
    if len(calls) != 1 or not isinstance(calls[0], ToolCall):
        return False
    try:
        return (
            calls[0].name == _CALL.name and convert_arguments(_CALL.name, _PARAMETERS, calls[0].arguments) == _ARGUMENTS
        )
    except ArgumentError:
        return False


def _counts_calls(template: MessageTemplate) -> bool:
    """Whether a result with a given id is shown in another way behind an earlier call."""
    assert template.calls is not None
    result = {"role": "tool", "content": "4", "name": _CALL.name, "tool_call_id": template.calls.format.call_id("", 1)}
    alone, template.calls = template.tails([result]), replace(template.calls, counted=True)
    try:
        return template.tails([result], 1) != alone
    except (NoTemplate, ValueError):
        return False


def _prove_results(template: MessageTemplate, messages: CallMessages) -> CallMessages:
    """The messages of several calls, or of one, behind which the template shows tool results; an error if it shows
    none."""
    before, result = template.calls, {"role": "tool", "content": "4", "name": _CALL.name}
    try:
        template.calls = replace(messages, several=True)
        try:
            template.ids([result, result], -1)
        except (NoTemplate, ValueError):
            template.calls = replace(messages, several=False)
            template.ids([result, result], -1)
        return replace(template.calls, counted=_counts_calls(template))
    finally:
        template.calls = before
