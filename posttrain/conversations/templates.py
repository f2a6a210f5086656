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

from posttrain.conversations.formats.base import UNNAMED, CallFormat
from posttrain.conversations.untrusted_text import Message, untrusted_text
from posttrain.errors import UserError

_PLACEHOLDER = "1f6a9c27e4"
_QUESTION = {"role": "user", "content": "?"}
_TURN = {"role": "assistant", "content": _PLACEHOLDER}


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
    counted: bool = False
    """Whether the template itself numbers the calls of a conversation, so that a result depends on those before it."""

    def message(self, calls: Sequence[tuple[str, Mapping[str, Any]]], ids: Sequence[str] = ()) -> Message:
        """The message of these calls: (name, arguments) of each."""
        ids = ids or [self.format.call_id(name, number) for number, (name, _) in enumerate(calls)]
        made = [
            {
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if self.as_text else dict(given)},
            }
            for id, (name, given) in zip(ids, calls, strict=True)
        ]
        return {"role": "assistant", "content": self.content, "tool_calls": made}

    def placeholder(self, results: Sequence[Message], mark: str) -> Message:
        """A turn with a call for each of these results; arguments begin with `mark`."""
        calls = [(one["name"], {"text": f"{mark}{number}"}) for number, one in enumerate(results)]
        return self.message(calls, [one["tool_call_id"] for one in results])

    def earlier(self, count: int) -> list[Message]:
        """So many calls, each with its result."""
        found = list[Message]()
        for number in range(count if self.counted else 0):
            id = self.format.call_id(UNNAMED, number)
            found += [
                self.message([(UNNAMED, {"text": "?"})], [id]),
                {"role": "tool", "content": "?", "name": UNNAMED, "tool_call_id": id},
            ]
        return found


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

    def with_options(self, options: Mapping[str, Any]) -> MessageTemplate:
        """The same template with these variables besides its own."""
        made = MessageTemplate(self.tokenizer, {**self.options, **options})
        made.calls = self.calls
        return made

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Messages as a prompt, up to where the model's answer begins."""
        more = {"tools": tools} if tools else {}
        return self.untrusted.ids(messages, lambda given: self.render(given, opens=True, **more))

    def ids(self, messages: Sequence[Message], last_token: int, calls_before: int = 0) -> list[int]:
        """What follows a turn of the model that has this last token: the messages, and the opening of its next turn.
        Results without the ids of their calls are those of its calls in order, behind `calls_before` earlier ones of
        the conversation."""
        return self.untrusted.ids(messages, lambda given: self._after(given, last_token, calls_before))

    def check_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Rejects a template that hides tools or their answers, or that rewrites earlier turns once a tool answered."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the tokenizer has no chat template, so nothing says how a tool's "
                "answer is shown to the model. Use an instruct model's tokenizer (model.tokenizer_path)."
            )
        shown = [{"role": "tool", "content": _PLACEHOLDER[::-1]}]
        try:
            end, after = self.tails(shown)
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

    def _after(self, messages: Sequence[Message], last_token: int, calls_before: int) -> str:
        end, text = self.tails(messages, calls_before)
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

    def tails(self, messages: Sequence[Message], calls_before: int = 0) -> tuple[str, str]:
        """What the template writes behind the model's turn: (its end, its end with the messages and the opening of the
        next turn). A placeholder stands for the turn."""
        turn, mark, shown, before = _TURN, _PLACEHOLDER, list(messages), [_QUESTION]
        has_results = self.calls is not None and any(one["role"] == "tool" for one in messages)
        if self.calls and has_results:
            shown = self._identified(messages, calls_before)
            answered = [one for one in shown if one["role"] == "tool"][: None if self.calls.several else 1]
            turn = self.calls.placeholder(answered, _PLACEHOLDER)
            mark = f"{_PLACEHOLDER}{len(answered) - 1}"  # stands in the last call
            before += self.calls.earlier(calls_before)
        key, tools = f"{len(before)} {turn}", self.calls.tools if self.calls else None
        alone = self._ends.get(key)
        if alone is None:
            if len(self._ends) > 1000:  # a model may write any name into a call
                self._ends.clear()
            alone = self._ends[key] = self.render([*before, turn], opens=False, tools=tools).partition(mark)[2]
        text = self.render([*before, turn, *shown], opens=True, tools=tools)
        text = text[text.index(mark) + len(mark) :]
        if self.calls and has_results:
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

    def _identified(self, messages: Sequence[Message], calls_before: int) -> list[Message]:
        """The messages, results with the names and ids of the calls that they answer."""
        assert self.calls is not None
        found, ids = list[Message](), list[str]()
        for one in messages:
            if one["role"] == "tool":
                name = one.get("name") or UNNAMED
                ids.append(one.get("tool_call_id") or self.calls.format.call_id(name, calls_before + len(ids)))
                one = {**one, "name": name, "tool_call_id": ids[-1 if self.calls.several else 0]}
            found.append(one)
        return found

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
        return _PLACEHOLDER[::-1] in self.tails(shown)[1]

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
