"""What an agent tells a model as tokens behind the model's turn, and the opening of its next turn.

The tokens that the model wrote stay as they are: only what the chat template puts behind a turn is rendered, behind a
stand-in for that turn. A template that would write earlier turns in another way (without their thinking, say) is not
asked to: the model continues from what it has read and written itself. Messages are plain text, whatever they spell
(`turns/outside_text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import UserError
from posttrain.rollout.turns.outside_text import Message, outside_text

_MARK = "1f6a9c27e4"


class NoTemplate(UserError):
    """A chat template that cannot show what an agent says."""


class Told:
    """Token ids of messages. Example: `Told(tokenizer).ids([{"role": "user", "content": "Higher."}], last_token)`."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(template_kwargs or {})
        self.outside = outside_text(tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        """Messages as a prompt, up to where the model's answer begins."""
        more = {"tools": tools} if tools else {}
        return self.outside.ids(messages, lambda those: self._rendered(those, opens=True, **more))

    def ids(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """What comes behind a turn of the model that has this last token."""
        return self.outside.ids(messages, lambda those: self._after(those, last_token))

    def _after(self, messages: Sequence[Message], last_token: int) -> str:
        end = self._behind([], opens=False)
        text = self._behind(messages, opens=True)
        if not text.startswith(end):
            raise NoTemplate("The chat template ends a model's turn in another way once somebody has answered.")
        if last_token in self.tokenizer.all_special_ids:  # the model has ended its turn itself
            ends = [one for one in self.tokenizer.all_special_tokens if one and one in end]
            text = text[max((end.rindex(one) + len(one) for one in ends), default=0) :]
        return text

    def _behind(self, messages: Sequence[Message], *, opens: bool) -> str:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        text = self._rendered([*said, *messages], opens=opens)
        behind = text[text.index(_MARK) + len(_MARK) :]
        for message in messages:
            if str(message["content"]).strip() not in behind and not self._shows(message["role"]):
                raise NoTemplate(f"The chat template leaves out messages of the role `{message['role']}`.")
        return behind

    def _shows(self, role: str) -> bool:
        """Whether a message is in what the template writes: one that it quotes is there in another spelling."""
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "?"}]
        return _MARK in self._rendered([*said, {"role": role, "content": _MARK}], opens=True)

    def _rendered(self, messages: Sequence[Message], *, opens: bool, **more: Any) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise NoTemplate(
                "The tokenizer has no chat template, so that nothing says how a message is shown to the model. Use an "
                "instruct model's tokenizer (model.tokenizer_path), or give token ids."
            )
        options = {**self.options, **more, "add_generation_prompt": opens}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
        except UserError:  # one that does not end, which says so itself
            raise
        except Exception as error:  # templates raise errors of their own making, such as an unsupported role
            raise NoTemplate(f"The chat template refuses these messages: {error}") from error
