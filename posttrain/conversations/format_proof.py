"""The format of a run's tool calls, proved by a round trip: the chat template writes a call, and the format reads it.

A format that does not fit the model is hard to notice later: right calls would be answered as wrong ones, or never be
seen. So a run starts only with a format that reads what its chat template writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from posttrain.conversations.formats.base import AUTO, FORMATS, CallFormat
from posttrain.conversations.settings import TURNS_KEY as KEY
from posttrain.conversations.templates import CallMessages, MessageTemplate, NoTemplate
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import ToolCall
from posttrain.errors import UserError

FALLBACK = "hermes"
"""For chat templates that do not write tool calls."""
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
# A generation prompt may open or skip the model's thinking, which a finished turn does not show.
_THINKING = re.compile(r"\s*(?:<think>|\[THINK\])?\s*(?:</think>|\[/THINK\])?\s*\Z")
_SHOWN = 300


class WrongFormat(UserError):
    """The chosen format does not read what the chat template writes."""


@dataclass(frozen=True)
class Proof:
    """What the round trips of a chat template showed."""

    forms: dict[str, CallMessages]
    """Formats that read the call, with the form of messages that the template takes."""
    written: str
    """The turn as the template wrote it; empty if it does not write calls."""


def prove_formats(template: MessageTemplate) -> Proof:
    """Tries every format on a chat template."""
    forms, written = dict[str, CallMessages](), ""
    for name, form in FORMATS.items():
        for messages in (CallMessages(form, content, as_text) for content in ("", None) for as_text in (False, True)):
            turn = _write_turn(template, messages)
            if turn and _CALL.name in turn:
                written = written or turn
                if _reads(form, turn) and (proved := _prove_results(template, messages)):
                    forms[name] = proved
                    break
    return Proof(forms, written)


def choose_format(template: MessageTemplate, wanted: str) -> tuple[str, str]:
    """(the format of the run, a note for the user). `template` renders tool results in that format from now on."""
    proof = prove_formats(template)
    fitting = ", ".join(proof.forms)
    if wanted in proof.forms or (wanted == AUTO and proof.forms):
        name = wanted if wanted in proof.forms else next(iter(proof.forms))
        template.calls = proof.forms[name]
        return name, ""
    if not proof.written:
        name = FALLBACK if wanted == AUTO else wanted
        return name, (
            f"note: the chat template does not write tool calls, so nothing proves that the model writes them as "
            f"{KEY}.format={name} reads them."
        )
    shown = proof.written.strip()[:_SHOWN]
    if proof.forms:
        raise WrongFormat(
            f"{KEY}.format={wanted} does not read the tool calls of this model. Its chat template writes:\n{shown}\n"
            f"  to do:  set {KEY}.format={fitting}, or leave it out: auto finds it"
        )
    raise WrongFormat(
        f"no format of tool calls reads what the chat template writes ({KEY}.format={wanted}):\n{shown}\n"
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


def _write_turn(template: MessageTemplate, messages: CallMessages) -> str:
    """The model's turn with the call, as the template writes it; empty if the template refuses the message."""
    try:
        turn: Any = messages.message([(_CALL.name, _ARGUMENTS)])
        text = template.render([_QUESTION, turn], opens=False, tools=[_SCHEMA])
        prompt = template.render([_QUESTION], opens=True, tools=[_SCHEMA])
    except NoTemplate:
        return ""
    for beginning in (prompt, _THINKING.sub("", prompt)):
        if text.startswith(beginning):
            return text[len(beginning) :]
    return text.rpartition(str(_QUESTION["content"]))[2]


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


def _prove_results(template: MessageTemplate, messages: CallMessages) -> CallMessages | None:
    """The messages of several calls, or of one, behind which the template shows tool results; None if it does not."""
    before, result = template.calls, {"role": "tool", "content": "4", "name": _CALL.name}
    try:
        for several in (True, False):
            template.calls = replace(messages, several=several)
            try:
                template.ids([result, result], -1)
                return template.calls
            except (NoTemplate, ValueError):  # ValueError: the template left out the last call
                continue
        return None
    finally:
        template.calls = before
