"""Prompts as token ids: the chat template renders a string or a list of messages once, and it is tokenized once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from posttrain.data.fields import Messages
from posttrain.data.rows import DataError
from posttrain.errors import UserError

HINT = "use an instruct model's tokenizer (model.tokenizer_path), or prompts that are plain strings."


class TemplateError(DataError):
    """A chat template that raised on a row."""


def ignored_template_settings(
    tokenizer: Any, system_prompt: str | None, template_kwargs: Mapping[str, Any]
) -> list[str]:
    """Return sentences about settings that the chat template ignores."""
    found, template = [], tokenizer.chat_template
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    for key in template_kwargs:
        if isinstance(template, str) and key not in template and key not in parameters:
            found.append(f"data.apply_chat_template_kwargs: the chat template does not use `{key}`.")
    if system_prompt:
        messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "?"}]
        with suppress(Exception):  # a template that rejects system messages reports it at the first prompt
            if system_prompt.strip() not in str(
                tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
            ):
                found.append("data.system_prompt: the chat template leaves it out, and the model never sees it.")
    return found


def apply_template(tokenizer: Any, messages: Messages, what: str, **options: Any) -> str:
    """Render messages with the tokenizer's chat template; errors name `what`."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except UserError:  # an endless template, which has its own message
        raise
    except Exception as error:  # templates raise their own errors, such as for an unsupported role
        raise TemplateError(f"The chat template refused {what}: {error}") from error


class ChatRenderer:
    """Renders and tokenizes prompts. Example: `ChatRenderer(tokenizer).render("15 + 27 = ?")` gives messages and text.

    Without a chat template, a plain string is the whole text, and messages are an error.
    """

    def __init__(
        self, tokenizer: Any, *, system_prompt: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.template_kwargs = dict(template_kwargs or {})
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.notes: list[str] = []
        self._check_settings()

    def _check_settings(self) -> None:
        # The text is needed too: for logs, for rewards, and to find where turns begin.
        if "tokenize" in self.template_kwargs:
            raise DataError(
                "data.apply_chat_template_kwargs: `tokenize` cannot be set; prompts are rendered, then tokenized."
            )
        if not self.has_template:
            useless = {
                "data.system_prompt": self.system_prompt,
                "data.apply_chat_template_kwargs": self.template_kwargs,
            }
            for setting, value in useless.items():
                if value:
                    raise DataError(f"{setting} is set, but the tokenizer has no chat template to use it; {HINT}")
            return
        self.notes += ignored_template_settings(self.tokenizer, self.system_prompt, self.template_kwargs)

    def messages(self, prompt: str | Messages) -> Messages:
        """Return the conversation for a prompt: a string becomes one user message after the system prompt."""
        if not isinstance(prompt, str):
            return prompt
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": prompt}]

    def render(self, prompt: str | Messages, where: str = "the prompt") -> tuple[Messages, str]:
        """Return the messages and the text that the model reads, up to where its answer begins; errors name `where`."""
        messages = self.messages(prompt)
        if not self.has_template:
            if isinstance(prompt, str):
                return messages, prompt
            raise DataError(
                f"The prompt of {where} is a list of messages, but the tokenizer has no chat template; {HINT}"
            )
        options = {"add_generation_prompt": True, **self.template_kwargs}
        return messages, apply_template(self.tokenizer, messages, f"the prompt of {where}", **options)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of rendered texts; a template writes the special tokens itself, so none are added."""
        if not texts:
            return []
        # Not verbose: overlong prompts are counted and reported once, instead of the tokenizer's warning.
        return self.tokenizer(list(texts), add_special_tokens=not self.has_template, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids as the model reads it, with special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
