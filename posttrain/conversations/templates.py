"""Messages as tokens behind a turn of the model, and the opening of its next turn.

The tokens that the model sampled stay as they are: only what the chat template writes behind a turn is rendered, behind
a placeholder for that turn. What the template would make of earlier turns (some drop their thinking) does not matter,
since the model continues from the tokens that it has read and sampled. Messages are plain text, whatever control tokens
they spell (`untrusted_text.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.conversations.formats.base import CallFormat
from posttrain.conversations.untrusted_text import Message, untrusted_text
from posttrain.errors import UserError

_PLACEHOLDER = "1f6a9c27e4"
_QUESTION = {"role": "user", "content": "?"}
_TURN = {"role": "assistant", "content": _PLACEHOLDER}
_UNNAMED = "tool"


class NoTemplate(UserError):
    """A chat template that cannot show what an agent tells the model."""


class NoToolsInTemplate(UserError):
    """A chat template that tools cannot be used with."""


@dataclass(frozen=True)
class CallMessages:
    """Assistant messages with tool calls, in the form that a chat template accepts; templates differ in it."""

    format: CallFormat
    content: str | None = ""
    as_text: bool = False
    """Whether arguments are JSON text, as in OpenAI's API, instead of a mapping."""
    several: bool = True
    """Whether a message may have several calls."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that are shown while results are rendered: some templates cannot do without any (Hermes 2 and 3)."""

    def message(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Message:
        """The message of these calls: (name, arguments) of each."""
        made = [
            {
                "id": self.format.call_id(name, number),
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if self.as_text else dict(given)},
            }
            for number, (name, given) in enumerate(calls)
        ]
        return {"role": "assistant", "content": self.content, "tool_calls": made}


class MessageTemplate:
    """Token ids of messages. Example: `MessageTemplate(tokenizer).ids([{"role": "tool", "content": "4"}], last)`."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(template_kwargs or {})
        self.untrusted = untrusted_text(tokenizer)
        self._special_ids = {number: text for text, number in self.untrusted.special.items()}
        self.calls: CallMessages | None = None
        """How the template takes tool calls, once that is proved (`format_proof.py`). Tool results are then rendered
        behind a turn with calls: some templates reject, or write differently, results that no call precedes."""
        self._ends: dict[str, str] = {}  # what follows a turn that nothing follows; rendered once, as turns are many

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Messages as a prompt, up to where the model's answer begins."""
        more = {"tools": tools} if tools else {}
        return self.untrusted.ids(messages, lambda given: self.render(given, opens=True, **more))

    def ids(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """What follows a turn of the model that has this last token: the messages, and the opening of its next turn."""
        return self.untrusted.ids(messages, lambda given: self._after(given, last_token))

    def check_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Rejects a template that hides tools or their answers, or that rewrites earlier turns once a tool answered."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the tokenizer has no chat template, so nothing says how a tool's "
                "answer is shown to the model. Use an instruct model's tokenizer (model.tokenizer_path)."
            )
        shown = [{"role": "tool", "content": _PLACEHOLDER[::-1]}]
        try:
            end, after = self._tails(shown)
        except NoTemplate as error:
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template refuses messages of the role `tool`: "
                f"{error.__cause__}. Use an instruct model that was made for tools, or give the tokenizer another "
                "template."
            ) from error
        if not after.startswith(end):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template ends the model's turn in another way once a tool "
                "has answered, so that turns cannot be put behind each other as tokens. Give the tokenizer a template "
                "that only adds to what stands there."
            )
        if shown[0]["content"] not in after:
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template leaves out what a tool answers (messages of the "
                "role `tool`). Use an instruct model that was made for tools, or give the tokenizer another template."
            )
        text = self.tokenizer.apply_chat_template(
            [_QUESTION], tokenize=False, **{**self.options, "tools": list(schemas)}
        )
        hidden = [name for name in (schema["function"]["name"] for schema in schemas) if name not in str(text)]
        if hidden:
            raise NoToolsInTemplate(
                f"rollout.tools: the chat template does not show {', '.join(hidden)} to the model. Use an instruct "
                "model that was made for tools, or give the tokenizer another template (model.tokenizer_path)."
            )

    def _after(self, messages: Sequence[Message], last_token: int) -> str:
        end, text = self._tails(messages)
        if not text.startswith(end):
            raise NoTemplate("The chat template ends a model's turn in another way once somebody has answered.")
        for message in messages:
            if str(message["content"]).strip() not in text and not self._shows(message):
                raise NoTemplate(f"The chat template leaves out messages of the role `{message['role']}`.")
        # The model usually samples the token that ends its turn; the template's own copy of it is dropped then. A turn
        # that was cut by a stop text or by its budget has none, and gets it here.
        last = self._special_ids.get(last_token, "")
        if last and not (self.calls and self.calls.format.closing.endswith(last)):  # that one ends calls, not a turn
            ends = [one for one in self.untrusted.special if one in end]
            text = text[max((end.rindex(one) + len(one) for one in ends), default=0) :]
            # GLM's turns end with the token that begins the next message, <|observation|> or <|user|>.
            text = text.removeprefix(last)
        return text

    def _tails(self, messages: Sequence[Message]) -> tuple[str, str]:
        """What the template writes behind the model's turn: (its end, its end with the messages and the opening of the
        next turn). A placeholder stands for the turn."""
        turn, mark, shown = _TURN, _PLACEHOLDER, list(messages)
        names = [one.get("name") or _UNNAMED for one in messages if one["role"] == "tool"]
        if self.calls and names:
            names = names if self.calls.several else names[:1]
            mark = f"{_PLACEHOLDER}{len(names) - 1}"  # stands in the last call
            turn = self.calls.message([(name, {"text": f"{_PLACEHOLDER}{n}"}) for n, name in enumerate(names)])
            shown = _with_ids(messages, [one["id"] for one in turn["tool_calls"]])
        key, tools = str(turn), self.calls.tools if self.calls else None
        if key not in self._ends:
            if len(self._ends) > 100:  # a model may write any name into a call
                self._ends.clear()
            self._ends[key] = self.render([_QUESTION, turn], opens=False, tools=tools).partition(mark)[2]
        alone, text = self._ends[key], self.render([_QUESTION, turn, *shown], opens=True, tools=tools)
        text = text[text.index(mark) + len(mark) :]
        if self.calls and names:
            alone, text = self._behind_calls(alone, text, self.calls.format)
        if not text.startswith(alone):
            alone = self._without_opening(alone, tools)
        if alone.strip() in self.untrusted.special and not text.startswith(alone):
            # Some end the last turn of all in another way: gpt-oss with <|return|> instead of <|end|>, Nemotron Nano v2
            # without the line before <SPECIAL_12>.
            begin = text.lstrip()
            found = max((one for one in self.untrusted.special if begin.startswith(one)), key=len, default="")
            alone = text[: len(text) - len(begin)] + found if found else alone
        return alone, text

    def _behind_calls(self, alone: str, text: str, form: CallFormat) -> tuple[str, str]:
        """What stands behind the calls of the turn, where nothing follows it and where results do."""
        end = form.turn_end(alone)
        if text.startswith(alone[:end]):
            return alone[end:], text[end:]
        # Apriel writes the id of a call once it is answered.
        pieces = text.split(form.closing, alone[:end].count(form.closing))
        return alone[end:], pieces[-1]

    def _without_opening(self, end: str, tools: Any) -> str:
        """The end of a turn without the opening of the next one, which Command R7B writes behind every message."""
        before, mark, opening = end.partition(self.tokenizer.eos_token or "\0")
        opens = opening.strip() and self.render([_QUESTION], opens=True, tools=tools).endswith(opening)
        return before + mark if opens else end

    def _shows(self, message: Message) -> bool:
        """Whether the template shows such messages at all: it may quote them, and so spell them differently."""
        shown = [{**message, "content": _PLACEHOLDER[::-1]}]
        return _PLACEHOLDER[::-1] in self._tails(shown)[1]

    def render(self, messages: Sequence[Message], *, opens: bool, **more: Any) -> str:
        """The messages as text; `opens` begins the model's next turn behind them."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise NoTemplate(
                "The tokenizer has no chat template, so that nothing says how a message is shown to the model. Use an "
                "instruct model's tokenizer (model.tokenizer_path), or give token ids."
            )
        options = {**self.options, **more, "add_generation_prompt": opens}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except UserError:  # a template that does not end, which says so itself
            raise
        except Exception as error:  # templates raise errors of their own making, such as an unsupported role
            raise NoTemplate(f"The chat template refuses these messages: {error}") from error


def _with_ids(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """Tool results with the names and ids of the calls that they answer."""
    left = iter(ids)
    return [
        {**one, "name": one.get("name") or _UNNAMED, "tool_call_id": next(left, ids[-1])}
        if one["role"] == "tool"
        else one
        for one in messages
    ]
