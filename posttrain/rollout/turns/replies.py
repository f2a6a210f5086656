"""What tools say as tokens behind a turn of the model, and the opening of its next turn.

The tokens that the model wrote stay as they are: a conversation is never rendered and cut into tokens again. Only what
the chat template puts between a model's turn and its next one is rendered, behind a stand-in for what was said before.
What a tool answers is plain text, whatever it spells (`outside_text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.errors import UserError
from posttrain.rollout.turns.outside_text import Message, outside_text

_MARK = "1f6a"


class NoToolsInTemplate(UserError):
    """A chat template that tools cannot be used with."""


def check_shown(tokenizer: Any, schemas: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> None:
    """Refuses a chat template that leaves out what tools there are."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], tokenize=False, **{**template_kwargs, "tools": list(schemas)}
    )
    hidden = [name for name in (schema["function"]["name"] for schema in schemas) if name not in str(text)]
    if hidden:
        raise NoToolsInTemplate(
            f"rollout.tools: the chat template does not show {', '.join(hidden)} to the model. Use an instruct model "
            "that was made for tools, or give the tokenizer another template (model.tokenizer_path)."
        )


class Replies:
    """Token ids of tools' answers. Example: `Replies(tokenizer).ids(["4"])`."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.outside = tokenizer, outside_text(tokenizer)
        self.options = {name: value for name, value in (template_kwargs or {}).items() if name != "tools"}
        if not getattr(tokenizer, "chat_template", None):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the tokenizer has no chat template, so nothing says how a tool's "
                "answer is shown to the model. Use an instruct model's tokenizer (model.tokenizer_path)."
            )
        self.before = self._rendered([], opens=False)
        if _MARK not in self._between([_said_by_a_tool(_MARK)]):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template leaves out what a tool answers (messages of the "
                "role `tool`). Use an instruct model that was made for tools, or give the tokenizer another template."
            )

    def ids(self, answers: Sequence[str], last_token: int) -> list[int]:
        """What comes behind the model's turn, which has this last token: the answers, and the opening of its next."""
        after = self._after_a_turn(last_token in self.tokenizer.all_special_ids)
        told = [_said_by_a_tool(answer) for answer in answers]
        return self.outside.ids(told, lambda messages: after + self._between(messages))

    def _after_a_turn(self, ended: bool) -> str:
        """What the template writes behind a model's words; without the token that ends a turn if the model wrote it."""
        after = self.before[self.before.rindex(_MARK) + len(_MARK) :]
        ends = [text for text in self.tokenizer.all_special_tokens if text and text in after] if ended else []
        return after[max((after.rindex(text) + len(text) for text in ends), default=0) :]

    def _between(self, told: Sequence[Message]) -> str:
        text = self._rendered(told, opens=True)
        if not text.startswith(self.before):
            raise NoToolsInTemplate(
                "rollout.multi_turn.enable=True: the chat template writes earlier turns in another way once a tool "
                "has answered, so that turns cannot be put behind each other as tokens. Give the tokenizer a template "
                "that only adds to what stands there."
            )
        return text[len(self.before) :]

    def _rendered(self, told: Sequence[Message], *, opens: bool) -> str:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [*said, *told], tokenize=False, **{**self.options, "add_generation_prompt": opens}
                )
            )
        except UserError:  # one that does not end, which says so itself
            raise
        except Exception as error:  # templates raise errors of their own making, such as an unsupported role
            raise NoToolsInTemplate(
                f"rollout.multi_turn.enable=True: the chat template refuses messages of the role `tool`: {error}. Use "
                "an instruct model that was made for tools, or give the tokenizer another template."
            ) from error


def _said_by_a_tool(answer: str) -> Message:
    return {"role": "tool", "content": answer}
