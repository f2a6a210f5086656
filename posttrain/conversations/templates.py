"""Messages as tokens behind a turn of the model, and the opening of its next turn.

The tokens that the model sampled stay as they are: only what the chat template writes behind a turn is rendered, behind
a placeholder for that turn. What the template would make of earlier turns (some drop their thinking) does not matter,
since the model continues from the tokens that it has read and sampled. Messages are plain text, whatever control tokens
they spell (`untrusted_text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.conversations.untrusted_text import Message, untrusted_text
from posttrain.errors import UserError

_PLACEHOLDER = "1f6a9c27e4"
_QUESTION = {"role": "user", "content": "?"}
_TURN = {"role": "assistant", "content": _PLACEHOLDER}


class NoTemplate(UserError):
    """A chat template that cannot show what an agent tells the model."""


class NoToolsInTemplate(UserError):
    """A chat template that tools cannot be used with."""


class MessageTemplate:
    """Token ids of messages. Example: `MessageTemplate(tokenizer).ids([{"role": "tool", "content": "4"}], last)`."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(template_kwargs or {})
        self.untrusted = untrusted_text(tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Messages as a prompt, up to where the model's answer begins."""
        more = {"tools": tools} if tools else {}
        return self.untrusted.ids(messages, lambda those: self._rendered(those, opens=True, **more))

    def ids(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """What follows a turn of the model that has this last token: the messages, and the opening of its next turn."""
        return self.untrusted.ids(messages, lambda those: self._after(those, last_token))

    def check_tools(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Rejects a template that hides tools or their answers, or that rewrites earlier turns once a tool answered."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the tokenizer has no chat template, so nothing says how a tool's "
                "answer is shown to the model. Use an instruct model's tokenizer (model.tokenizer_path)."
            )
        try:
            before = self._rendered([_QUESTION, _TURN], opens=False, tools=None)
            after = self._rendered(
                [_QUESTION, _TURN, {"role": "tool", "content": _PLACEHOLDER}], opens=True, tools=None
            )
        except NoTemplate as error:
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template refuses messages of the role `tool`: "
                f"{error.__cause__}. Use an instruct model that was made for tools, or give the tokenizer another "
                "template."
            ) from error
        if not after.startswith(before):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template writes earlier turns in another way once a tool "
                "has answered, so that turns cannot be put behind each other as tokens. Give the tokenizer a template "
                "that only adds to what stands there."
            )
        if _PLACEHOLDER not in after[len(before) :]:
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
        end = self._behind([], opens=False)
        text = self._behind(messages, opens=True)
        if not text.startswith(end):
            raise NoTemplate("The chat template ends a model's turn in another way once somebody has answered.")
        # The model usually samples the token that ends its turn; the template's own copy of it is dropped then. A turn
        # that was cut by a stop text or by its budget has none, and gets it here.
        if last_token in self.tokenizer.all_special_ids:
            ends = [one for one in self.tokenizer.all_special_tokens if one and one in end]
            text = text[max((end.rindex(one) + len(one) for one in ends), default=0) :]
        return text

    def _behind(self, messages: Sequence[Message], *, opens: bool) -> str:
        text = self._rendered([_QUESTION, _TURN, *messages], opens=opens, tools=None)
        behind = text[text.index(_PLACEHOLDER) + len(_PLACEHOLDER) :]
        for message in messages:
            if str(message["content"]).strip() not in behind and not self._shows(message["role"]):
                raise NoTemplate(f"The chat template leaves out messages of the role `{message['role']}`.")
        return behind

    def _shows(self, role: str) -> bool:
        """Whether the template shows such messages at all: it may quote them, and so spell them differently."""
        said = [_QUESTION, {"role": "assistant", "content": "?"}, {"role": role, "content": _PLACEHOLDER}]
        return _PLACEHOLDER in self._rendered(said, opens=True, tools=None)

    def _rendered(self, messages: Sequence[Message], *, opens: bool, **more: Any) -> str:
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
