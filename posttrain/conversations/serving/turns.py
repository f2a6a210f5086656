"""Turns of the model as text: read when they have ended, or piece by piece while they are sampled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from posttrain.conversations.formats.base import THINKING, CallFormat, open_thinking
from posttrain.conversations.serving.requests import Choice, Delta, Turn
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.conversations.tools.base import ToolCall
from posttrain.rollout.base import Output

_OPENING = 32  # tokens at the end of a prompt that show whether it opens the model's thinking


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one request. `tools` are the schemas by name; none where calls stay text."""

    tokenizer: Any
    format: CallFormat | None
    """None: the turn is nothing but text, behind a prompt that is no conversation."""
    special: Sequence[str]
    stop: Sequence[str]
    tools: dict[str, dict[str, Any]]
    opened: str
    """The mark with which the prompt has opened the model's thinking; empty if it has not."""
    calls_before: int = 0
    """Tool calls of earlier turns: ids that the model did not write count on, and depend on the conversation alone."""

    @classmethod
    def of(
        cls, tokenizer: Any, format: CallFormat | None, special: Sequence[str], prompt_ids: Sequence[int], **more: Any
    ):
        """The reader behind this prompt."""
        return cls(tokenizer, format, special, opened=_opened_by(tokenizer, tuple(prompt_ids[-_OPENING:])), **more)

    def decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids)

    def read(self, output: Output) -> Turn:
        """The whole turn. Calls that cannot be read, or that were cut off, stay text."""
        text, stop = self.cut(self.decode(output.token_ids))
        if self.format is None:
            return Turn(self.clean(text), stop=stop)
        found = self.format.read(self._opened(text)) if self.tools and output.finish_reason != "length" else []
        calls = [self._converted(call) for call in found if isinstance(call, ToolCall)]
        if len(calls) < len(found):
            calls = []
        thinking, words = self.format.split(self._opened(text), has_calls=bool(calls))
        ids = self.format.ids_of(calls, self.calls_before)
        return Turn(self.clean(words), self.clean(thinking), calls, ids, stop)

    def _opened(self, text: str) -> str:
        return self.opened + text

    def _converted(self, call: ToolCall) -> ToolCall:
        """Some formats write all arguments as texts; the tool's schema has their types."""
        parameters = self.tools.get(call.name, {}).get("parameters")
        try:
            given = convert_arguments(call.name, parameters, call.arguments) if parameters else call.arguments
            return replace(call, arguments=given)
        except (ArgumentError, TypeError, AttributeError, ValueError):  # a schema may be anything that is JSON
            return call

    def cut(self, text: str) -> tuple[str, str | None]:
        """(the text before the first stop text, that stop text)."""
        found = min(((text.find(stop), stop) for stop in self.stop if stop in text), default=(len(text), None))
        return text[: found[0]], found[1]

    def clean(self, text: str) -> str:
        return _any_of(tuple(self.special)).sub("", text) if self.special else text

    def so_far(self, text: str) -> tuple[str, str]:
        """(thinking, words) that are certain of a turn that is under way: what follows cannot take them back."""
        form = self.format
        if form is not None and not (form.streams and (form.opening or not self.tools)):
            return "", ""  # what begins as words may prove to be a call
        text, _ = self.cut(text[: len(text) - self._held(text)])
        if form is None:
            return "", self.clean(text)
        opened = self._opened(text)
        has_calls = bool(self.tools) and form.opening in opened
        thinking, words = form.split(opened, has_calls=has_calls)
        return self.clean(thinking), self.clean(words)

    def _held(self, text: str) -> int:
        """Characters at the end that may be the beginning of a mark, or blanks that are dropped before one."""
        calls = [self.format.opening] if self.format and self.tools else []
        marks = [*self.stop, *THINKING, *THINKING.values(), *calls]
        partial = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
        kept = text[: len(text) - partial]
        return partial + len(kept) - len(kept.rstrip())


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # The tokenizer's own call looks at the type of every id first, which takes longer than to decode them.
    if backend is not None and not tokenizer.clean_up_tokenization_spaces and _decodes_by_backend(type(tokenizer)):
        return backend.decode(list(ids), skip_special_tokens=False)
    return tokenizer.decode(list(ids), skip_special_tokens=False)


@lru_cache(maxsize=8)
def _decodes_by_backend(kind: type) -> bool:
    # A class of its own, such as one that comes with a model, may do more.
    return all(getattr(kind, name).__module__.startswith("transformers.tok") for name in ("decode", "_decode"))


@lru_cache(maxsize=8)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


@lru_cache(maxsize=8)
def _mark_ids(tokenizer: Any) -> frozenset[int]:
    """The added tokens with which marks that open thinking begin; none where no mark is a token of its own."""
    marks = [tokenizer(mark, add_special_tokens=False, verbose=False)["input_ids"] for mark in THINKING]
    if all(len(ids) > 1 for ids in marks):
        return frozenset()
    return frozenset({ids[0] for ids in marks} & tokenizer.added_tokens_decoder.keys())


def _opened_by(tokenizer: Any, ids: tuple[int, ...]) -> str:
    """The mark with which a prompt with this end has opened the model's thinking."""
    # Most have not, and a tokenizer takes longer to decode than to compare.
    if (marks := _mark_ids(tokenizer)) and marks.isdisjoint(ids):
        return ""
    return open_thinking(decode(tokenizer, ids))


class TurnStream:
    """The pieces of one choice. `feed` takes what was sampled since, `finish` the whole output."""

    def __init__(self, reader: TurnReader, index: int) -> None:
        self.reader, self.index = reader, index
        self._ids: list[int] = []
        self._start = self._read = 0
        self._text = self._thinking = self._words = ""

    def feed(self, ids: Sequence[int], log_probs: Sequence[float]) -> Delta:
        """What is new, with the tokens that are new: a token's id is sent even where its text is held back."""
        self._ids += ids
        # A character may consist of several tokens: only whole ones are read, with a token before them for context.
        before = self.reader.decode(self._ids[self._start : self._read])
        whole = self.reader.decode(self._ids[self._start :])
        if not whole.endswith("\ufffd"):
            self._text += whole[len(before) :]
            self._start, self._read = self._read, len(self._ids)
        return self._delta(*self.reader.so_far(self._text), ids, log_probs)

    def finish(self, output: Output) -> Delta:
        """The rest of the turn, and the finished choice."""
        turn, known = self.reader.read(output), len(self._ids)
        delta = self._delta(turn.thinking, turn.text, output.token_ids[known:], list(output.log_probs[known:]))
        delta.choice = Choice(self.index, output, turn)
        return delta

    def _delta(self, thinking: str, words: str, ids: Sequence[int], log_probs: Sequence[float]) -> Delta:
        more = thinking[len(self._thinking) :], words[len(self._words) :]
        self._thinking, self._words = max(thinking, self._thinking, key=len), max(words, self._words, key=len)
        return Delta(self.index, more[1], more[0], list(ids), [float(one) for one in log_probs])
