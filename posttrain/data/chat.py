"""Prompts and conversations as token ids under a chat template, with the assistant's tokens marked for training.

`ChatRenderer` renders a string or a list of messages once, and tokenizes it once. `SpanFinder` finds the tokens of a
conversation that the assistant wrote: exact spans under any chat template, or a clear error. It renders a conversation
as a whole, and up to each assistant turn with the generation prompt, which is what the model gets when it has to write
that turn. What the template writes from there to the end of the turn is trained: the turn's text and the token that
ends it, but nothing after that token (such as the newline of ChatML).

Some templates show a turn differently once others follow (Qwen3 drops the thoughts of earlier turns). Then one
conversation becomes several training sequences, each trained on its last turn, in the context that the model will see.
Templates that drop content, or start turns elsewhere than their generation prompt ends, are rejected.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from posttrain.data.fields import Messages, first_missing
from posttrain.data.rows import DataError
from posttrain.errors import UserError
from posttrain.texts import common_start

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


Span = tuple[int, int]
ASSISTANT = "assistant"
_QUESTION, _ANSWER = "What is asked?", "Answered7so."


@dataclass
class TrainedRow:
    """Token ids and, for each, whether it is trained."""

    ids: list[int]
    trained: list[bool]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one."""
        return self.trained.index(True)


class SpanFinder:
    """Converts conversations to training sequences.

    `split` counts conversations that became several sequences, `reworded` turns whose white space the template changed,
    `unclosed` turns without a token that ends them.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.template_kwargs = tokenizer, dict(template_kwargs or {})
        self.special = _special_ids(tokenizer)
        self.split = self.reworded = self.unclosed = 0
        self._probe()

    # -- the template itself --------------------------------------------------------------------------------------
    def _render(self, messages: Messages, where: str, *, generation: bool, tools: Any = None) -> str:
        options = {**self.template_kwargs, "add_generation_prompt": generation}
        if tools is not None:
            options["tools"] = tools
        return apply_template(self.tokenizer, messages, where, **options)

    def _probe(self) -> None:
        # Rejects templates that begin assistant turns with more than their generation prompt.
        messages = [{"role": "user", "content": _QUESTION}]
        try:
            prompt = self._render(messages, "a question", generation=True)
            whole = self._render([*messages, {"role": ASSISTANT, "content": _ANSWER}], "an answer", generation=False)
        except DataError:
            return  # the template needs other conversations than this one; those of the data are tried one by one
        head, found, _ = whole[len(prompt) :].partition(_ANSWER)
        if not (whole.startswith(prompt) and found and head):
            return
        if self.special.intersection(self._encode([head])[0]) or ASSISTANT in head.lower():
            raise DataError(
                f"The chat template has no generation prompt: it writes {head!r} before an assistant turn, but nothing "
                "of it when it is asked to begin one (add_generation_prompt). Take a template that does, by "
                "model.tokenizer_path."
            )

    # -- conversations --------------------------------------------------------------------------------------------
    def rows(self, messages: Messages, where: str, tools: Any = None) -> list[TrainedRow]:
        """Return the training sequences of one conversation, usually one; errors name `where`."""
        turns = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if not turns:
            raise DataError(
                f"The conversation of {where} has no assistant turn, so that there is nothing to learn from it."
            )
        rendered = [self._turn(messages, turn, where, tools) for turn in turns]
        spans = [(len(prompt), len(text)) for prompt, text in rendered]
        whole = rendered[-1][1]  # nothing trained sees what follows the last assistant turn
        # Usually each turn looks the same once others follow, and one sequence trains all of them.
        if all(whole.startswith(text) for _, text in rendered):
            return [self._row(whole, spans)]
        self.split += 1
        return [self._row(text, [span]) for (_, text), span in zip(rendered, spans, strict=True)]

    def _turn(self, messages: Messages, turn: int, where: str, tools: Any) -> tuple[str, str]:
        # (text up to where the assistant begins, text up to the end of its turn), as the model will see it.
        name = f"message {turn + 1} of the conversation of {where}"
        prompt = self._render(messages[:turn], f"what precedes {name}", generation=True, tools=tools)
        text = self._render(messages[: turn + 1], name, generation=False, tools=tools)
        if not text.startswith(prompt):
            at = common_start(prompt, text)
            raise DataError(
                f"The chat template shows {name} differently from what it asks the model to continue: after "
                f"{text[:at][-40:]!r} comes {text[at:][:40]!r} in the turn, but {prompt[at:][:40]!r} when it is asked "
                "to begin one. Trained on this, the model would begin elsewhere than it is asked to. Set "
                "data.apply_chat_template_kwargs, or take another template by model.tokenizer_path."
            )
        self._same_words(str(messages[turn].get("content") or ""), text[len(prompt) :], name)
        self._same_calls(messages[turn].get("tool_calls") or [], text[len(prompt) :], name)
        return prompt, text

    def _same_words(self, content: str, written: str, name: str) -> None:
        if content in written:
            return
        # Templates often strip a turn. Anything else that they change would train words that the data does not have.
        if "".join(content.split()) not in "".join(written.split()):
            raise DataError(
                f"The chat template does not write {name} as it is: it was given {content[:60]!r} and writes "
                f"{written[:60]!r}. Take a template that keeps it (model.tokenizer_path), or write the data as the "
                "template does."
            )
        self.reworded += 1

    def _same_calls(self, calls: list[dict[str, Any]], written: str, name: str) -> None:
        missing = first_missing(calls, written)
        if missing is not None:
            raise DataError(
                f"The chat template leaves out the tool call of {name}: {missing[:60]!r} does not stand in "
                f"{written[:60]!r}. Take the template of a model that was made for tools (model.tokenizer_path), or "
                "write the calls into the content as the model is to write them."
            )

    # -- tokens ---------------------------------------------------------------------------------------------------
    def _row(self, text: str, spans: Sequence[Span]) -> TrainedRow:
        # The ends of the text need no care: no token can cross them.
        edges = sorted({edge for span in spans for edge in span} - {0, len(text)})
        ids, places = self._tokenize_at_edges(text, edges)
        token_at = dict(zip([0, *edges, len(text)], [0, *places, len(ids)], strict=True))
        trained = [False] * len(ids)
        for start, end in spans:
            for at in range(token_at[start], self._find_turn_end(ids, token_at[start], token_at[end])):
                trained[at] = True
        return TrainedRow(ids, trained)

    def _find_turn_end(self, ids: list[int], start: int, end: int) -> int:
        # Training ends after the turn's last special token, if only white space follows; otherwise at its end.
        last = next((at for at in range(end - 1, start - 1, -1) if ids[at] in self.special), None)
        if last is None or self._decode(ids[last + 1 : end]).strip():
            self.unclosed += 1
            return end
        return last + 1

    def _tokenize_at_edges(self, text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
        # Returns (ids, token number of each edge), so that no token crosses an edge. Where one would (a generation
        # prompt that ends in a space), prompt and response are tokenized separately, as they are when a model writes.
        # The whole text is preferred: it is what the model sees in a prompt.
        cuts = [0, *edges, len(text)]
        whole, *pieces = self._encode([text, *(text[a:b] for a, b in pairwise(cuts))])
        joined = [token for piece in pieces for token in piece]
        by_pieces = [sum(map(len, pieces[: count + 1])) for count in range(len(edges))]
        if joined == whole:
            return whole, by_pieces
        beginnings = self._encode([text[:edge] for edge in edges])
        if all(whole[: len(ids)] == ids for ids in beginnings):  # the pieces differ only in how a text begins
            return whole, [len(ids) for ids in beginnings]
        if self._decode(joined) != self._decode(whole):
            raise DataError(
                "This tokenizer cannot cut a rendered conversation where an assistant turn begins or ends: tokens "
                f"cross that place, and cut there the text reads differently ({text[:60]!r} ...)."
            )
        return joined, by_pieces

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _special_ids(tokenizer: Any) -> set[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
