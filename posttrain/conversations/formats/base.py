"""The interface of a call format, and what formats share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from posttrain.conversations.tools.arguments import MOST_NESTED, is_shallow, well_formed_json
from posttrain.conversations.tools.base import ToolCall
from posttrain.registry import Registry
from posttrain.texts import well_formed

UNNAMED = "tool"
"""The name of a call that could not be read, in its result."""
AUTO = "auto"
"""The setting that leaves the choice of a format to the chat template."""
_DECODER = json.JSONDecoder()
# Models quote calls while they think about them; only what stands outside of these marks is a call.
THINKING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<mm:think>": "</mm:think>",
    "<think:opensource>": "</think:opensource>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|thought_start|>": "<|thought_end|>",
    "<|think|>": "<|end|>",
    "<|channel>thought": "<channel|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
_MOST_BROKEN = 100  # an error of the decoder counts the lines before it, so that many take quadratic time
_BRACKET, _JSON_BEHIND_MARK = re.compile(r"[\[{]"), re.compile(r">\s*+(?=[\[{])")
_THINKS = "|".join(re.escape(mark) for mark in THINKING)
_THOUGHT = "|".join(re.escape(mark) for mark in THINKING.values())
_OPENS_OR_SKIPS = re.compile(rf"(?:(?:{_THINKS})\s*)?(?:(?:{_THOUGHT})\s*)?\Z")


class Unreadable(ValueError):
    """Text that was meant as a call and cannot be read; the message is for the model."""


class CallFormat(ABC):
    """How one family of models writes tool calls. Example: `FORMATS["hermes"].read(text)`."""

    models: str
    """The families that write calls like this, for the documentation."""
    opening: str = ""
    """The text at which the calls of a turn begin, behind its words; empty: a turn with calls has no words."""
    streams: ClassVar[bool] = True
    """Whether the words of a turn are known before it has ended."""
    closing: str
    """The text that ends the calls of a turn. What a chat template writes behind it ends the turn itself."""
    word_marks: re.Pattern[str] | None = None
    """Marks that stand around or behind the words of a turn, and are none of them."""
    id_form: ClassVar[re.Pattern[str]] = re.compile(r"[\w.:-]{1,80}")
    """Ids of calls that the model may choose itself. Chat templates write ids as they are."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, besides those of the settings: for models that do not end it behind a call themselves."""

    @abstractmethod
    def read(self, text: str) -> list[ToolCall | Unreadable]:
        """The calls of a turn, in order; special tokens are in the text. It never raises."""

    @abstractmethod
    def write(self, call: ToolCall) -> str:
        """A call as the model would write it."""

    def split(self, text: str, *, has_calls: bool) -> tuple[str, str]:
        """(thinking, words) of a turn. Without `has_calls` its calls, if any, are words."""
        begin, turn = "", text.lstrip()
        if found := re.match(_THINKS, turn):
            end = turn.find(THINKING[found[0]], found.end())
            if end < 0:
                return turn[found.end() :].strip(), ""
            begin, text = turn[found.end() : end].strip(), turn[end + len(THINKING[found[0]]) :].lstrip("\n")
        if has_calls:
            text = text.partition(self.opening)[0].rstrip() if self.opening else ""
        return begin, self.word_marks.sub("", text).rstrip() if self.word_marks else text

    def turn_end(self, rendered: str) -> int:
        """Where the calls of a turn that a chat template wrote end; what follows ends the turn."""
        return rendered.rindex(self.closing) + len(self.closing)

    def call_id(self, name: str, number: int) -> str:
        """The id of a call in messages. Mistral's templates require nine letters and digits."""
        return f"call{number:05d}"

    def ids_of(self, calls: Sequence[ToolCall | Unreadable], before: int) -> list[str]:
        """The ids of a turn's calls, behind so many calls in the conversation: those that the model wrote, if each has
        one of its own."""
        own = [call.id or "" for call in calls if isinstance(call, ToolCall)]
        if len(set(own)) == len(calls) and all(map(self.id_form.fullmatch, own)):
            return own
        names = [call.name if isinstance(call, ToolCall) else UNNAMED for call in calls]
        return [self.call_id(name, before + number) for number, name in enumerate(names)]

    def read_json(self, name: str, arguments: str) -> ToolCall | Unreadable:
        """A call whose arguments are a JSON object, with its name beside them."""
        try:
            return read_call({"name": name.strip(), "arguments": json.loads(arguments)}, "arguments")
        except (ValueError, RecursionError):
            return self.explain()

    def explain(self) -> Unreadable:
        """Tells the model how a call is written."""
        return Unreadable(f"A tool call must be written like this: {self.write(ToolCall('NAME', {'KEY': 'VALUE'}))}")


class BlockFormat(CallFormat):
    """Calls that stand between two marks, outside of thinking."""

    block: tuple[str, str | None] | None = None
    """The marks around what `read_block` reads, where these are not `opening` and `closing`: of one call, or of all
    calls of a turn. Without a closing one, a block is the rest of the turn."""

    def read(self, text: str) -> list[ToolCall | Unreadable]:
        marks = self.block or (self.opening, self.closing)
        return [call for inner in find_blocks(text, *marks, self.block_end) for call in self.read_block(inner)]

    def block_end(self, text: str, place: int, closing: str) -> int:
        """Where the block that begins at this place has its closing mark; -1 if it has none. A text that is quoted in
        the block may spell the mark."""
        return json_block_end(text, place, closing)

    @abstractmethod
    def read_block(self, inner: str) -> Iterable[ToolCall | Unreadable]:
        """The calls between two marks; `explain()` if there are none. It never raises."""


FORMATS: Registry[CallFormat] = Registry("format of tool calls", package="posttrain.conversations.formats")


def json_block_end(text: str, place: int, closing: str) -> int:
    """Where the block that begins at this place has its closing mark: behind the first JSON value in it, whose texts
    may spell the mark."""
    end = text.find(closing, place)
    found = _BRACKET.search(text, place, end) if end >= 0 else None
    if not found:
        return end
    try:
        behind = _DECODER.raw_decode(text, found.start())[1]
    except (ValueError, RecursionError):
        return end
    return text.find(closing, behind) if behind > end else end


def find_blocks(
    text: str, opening: str, closing: str | None, block_end: Callable[[str, int, str], int] = json_block_end
) -> Iterator[str]:
    """What stands between these marks outside of thinking. The last block may lack its closing mark; without any, a
    block is the rest of the turn."""
    marks, place = re.compile(f"{re.escape(opening)}|{_THINKS}"), 0
    while found := marks.search(text, place):
        if found[0] in THINKING:
            place = _end_of(text, THINKING[found[0]], found.end())
            continue
        end = block_end(text, found.end(), closing) if closing else -1
        yield text[found.end() : end if end >= 0 else len(text)]
        place = end + len(closing) if closing and end >= 0 else len(text)


def hide_json(text: str) -> tuple[str, str]:
    """(the text with another character for each `<` in the JSON that stands right behind a mark, that character): texts
    in JSON may spell marks, which end nothing."""
    spare = next((one for one in map(chr, range(0xE000, 0xF900)) if one not in text), "<")
    pieces, place, failed = list[str](), 0, 0
    while failed < _MOST_BROKEN and (found := _JSON_BEHIND_MARK.search(text, place)):
        pieces.append(text[place : found.end()])
        try:
            place = _DECODER.raw_decode(text, found.end())[1]
        except (ValueError, RecursionError):
            place, failed = found.end(), failed + 1
        pieces.append(text[found.end() : place].replace("<", spare))
    return "".join([*pieces, text[place:]]), spare


def show_json(value: Any, spare: str) -> Any:
    """A value with the hidden `<` in its texts again."""
    match value:
        case str():
            return value.replace(spare, "<")
        case dict():
            return {show_json(key, spare): show_json(one, spare) for key, one in value.items()}
        case list():
            return [show_json(one, spare) for one in value]
    return value


def open_thinking(prompt: str) -> str:
    """The mark with which a prompt has opened the model's thinking; empty if it has not. The turn behind it has the
    closing mark alone."""
    prompt = prompt.rstrip()
    return next((mark for mark in THINKING if prompt.endswith(mark)), "")


def without_thinking(prompt: str) -> str:
    """A prompt without the marks that open or skip thinking at its end: a finished turn does not show them."""
    return _OPENS_OR_SKIPS.sub("", prompt, count=1)


def skip_thinking(text: str) -> str:
    """The turn without the thinking that it begins with."""
    text = text.lstrip()
    while found := re.match(_THINKS, text):
        text = text[_end_of(text, THINKING[found[0]], found.end()) :].lstrip()
    return text


def _end_of(text: str, mark: str, place: int) -> int:
    """Where a mark ends; the end of the text if it is not there: unfinished thinking has no calls behind it."""
    found = text.find(mark, place)
    return found + len(mark) if found >= 0 else len(text)


def read_call(found: Any, key: str) -> ToolCall | Unreadable:
    """A call from its JSON object, which has the arguments under `key`."""
    try:
        name, arguments = found["name"], found.get(key, {})
        if isinstance(arguments, str):  # JSON inside a string, as in OpenAI's API
            arguments = json.loads(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return no_object(key)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Unreadable(f'In a tool call "name" is a text and "{key}" is an object.')
    if not is_shallow(arguments):
        return Unreadable(f'The "{key}" of a tool call may be nested {MOST_NESTED} deep at most.')
    return ToolCall(well_formed(name), well_formed_json(arguments))


def with_id(call: ToolCall | Unreadable, id: Any) -> ToolCall | Unreadable:
    """The call with the id that the model wrote, if it is one."""
    return replace(call, id=id) if isinstance(call, ToolCall) and isinstance(id, str) else call


def write_call(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def write_value(value: Any) -> str:
    """An argument in formats that write texts as they are, and everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def no_object(key: str) -> Unreadable:
    return Unreadable(f'A tool call must be one JSON object: {{"name": ..., "{key}": {{...}}}}.')
