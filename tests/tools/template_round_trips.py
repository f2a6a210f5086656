"""Conversations through real chat templates: which format `auto` picks, whether calls come back as they were, and
whether tokens that are appended turn by turn are those of the whole conversation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from call_templates import SPECIAL

from posttrain.conversations.format_proof import WrongFormat, choose_format, prove_formats
from posttrain.conversations.formats.base import FORMATS, THINKING, open_thinking, without_thinking
from posttrain.conversations.templates import MessageTemplate, NoTemplate, NoToolsInTemplate
from posttrain.conversations.tools.arguments import ArgumentError, convert_arguments
from posttrain.models.embedded import byte_tokenizer

_NAMES = {"type": "array", "description": "Names.", "items": {"type": ["string", "object"]}}
_LAT, _OPEN = {"type": "number", "description": "A number."}, {"type": "boolean", "description": "A choice."}
_AT = {"lat": _LAT, "names": _NAMES, "open": _OPEN}
_PLACE = {
    "town": {"type": "string", "description": "The town."},
    "at": {"type": "object", "description": "The place.", "properties": _AT},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write_note",
        "description": "Writes a note.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The text."},
                "count": {"type": "integer", "description": "How many."},
                "ratio": {"type": "number", "description": "A ratio."},
                "flag": {"type": "boolean", "description": "A choice."},
                "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags."},
                "place": {"type": "object", "description": "Where.", "properties": _PLACE},
            },
            "required": [],
        },
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {"text": "two words", "count": 3},
    "types": {"count": -7, "ratio": 0.25, "flag": False, "tags": ["a", "b c"]},
    "none": {},
    "texts like numbers": {"text": "007"},
    "text like true": {"text": "true"},
    "text like null": {"text": "null"},
    "text like JSON": {"text": '{"a": [1, 2]}'},
    "nested": {"place": {"town": "Östia", "at": {"lat": 41.7, "names": ["x", {"y": "z"}], "open": True}}},
    "numbers as texts in a list": {"tags": ["1", "02", "true"]},
    "unicode": {"text": "Grüße, 世界 🌍"},
    "quotes": {"text": "say \"yes\", 'no', `maybe` and \\ or \\n"},
    "lines": {"text": "first\nsecond\n\n\tfourth"},
    "marks": {"text": "a < b && c > d </b> & &amp;"},
    "empty text": {"text": ""},
    "blanks around": {"text": "  padded  "},
    "line at the end": {"text": "ends\n"},
}
"""What is written, by the name of what is hard about it."""
_SYSTEM, _USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "9f27c1d0?"}
_RESULTS = ("the result of 1", "the result of 2")
_FAREWELL, _MORE = "It is written.", {"role": "user", "content": "One more, please."}
_THOUGHT = "I should write it down first."
# Hy3's template joins them from two pieces.
_HY3 = [f"<｜hy_{name}:opensource｜>" for name in ("eos", "User", "Assistant", "begin_of_sentence")]
_SPECIALS = re.compile(
    r"<\|[^<>|\s'\"]{1,40}\|?>|<[^<>|\s'\"]{1,40}\|>|<｜[^<>\s'\"]{1,40}｜>|\[/?[A-Z_]{3,}\]|</?s>|]~!?b]?\[?|\[e~\["
    r"|<(?:start|end)_of_[a-z]+>|<seed:[a-z_]+>|]<][a-z]+\[>\[|</?assistant>|<sep>|<SPECIAL_\d+>"
)
_BLANKS = re.compile(r"\s+")
_MARKS = "|".join(re.escape(one) for one in (*THINKING, *THINKING.values()))
_ANALYSIS = r"<\|channel\|>analysis<\|message\|>.*?<\|end\|><\|start\|>assistant"
_THOUGHTS = re.compile(rf"{_MARKS}|{re.escape(_THOUGHT)}|{_ANALYSIS}")
_HEADER = 12  # characters at the end of a generation prompt that show where a turn begins


@dataclass
class Trips:
    """What the conversations through one template showed."""

    formats: list[str] = field(default_factory=list)
    """Those that read a call and were shown a result: `auto` picks the first one."""
    note: str = ""
    """The note with which a format is used that nothing proves."""
    rejected: str = ""
    """Why a run with tools stops at its start."""
    several: bool = True
    """Whether a turn may have several calls."""
    changed: list[str] = field(default_factory=list)
    """Names of ARGUMENTS that did not come back as they were."""
    differs: dict[str, str] = field(default_factory=dict)
    """How appended tokens differ from those of the conversation that is rendered at once: `blanks`, `thinking` or
    `text`, each with the first place."""


def tokenizer_with(template: str) -> Any:
    """A byte tokenizer with this chat template and every special token that its text names."""
    tokenizer = byte_tokenizer()
    found = [one for one in dict.fromkeys([*SPECIAL, *_HY3, *_SPECIALS.findall(template)]) if len(one) > 2]
    tokenizer.add_special_tokens({"additional_special_tokens": found})
    tokenizer.bos_token, tokenizer.eos_token = "<s>", _end_of_sequence(template)
    tokenizer.chat_template = template
    return tokenizer


def _end_of_sequence(template: str) -> str:
    for end in ("<|END_OF_TURN_TOKEN|>", "<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>"):
        if end in template:
            return end
    return "</s>"


def read_templates(folder: Path) -> dict[str, str]:
    """The templates of a folder, by the names of their files."""
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


def make_trips(source: str) -> Trips:
    """All conversations through a template."""
    trips, template = Trips(), MessageTemplate(tokenizer_with(source))
    try:
        picked, trips.note = choose_format(template, "auto")
        template.check_tools([TOOL])
    except (WrongFormat, NoToolsInTemplate) as error:
        picked, trips.rejected = "", str(error)
    trips.formats = list(prove_formats(template).forms)
    if template.calls is None:
        return trips
    trips.several = template.calls.several
    conversation = _Conversation(template, trips.formats[0])
    assert picked in ("", trips.formats[0])
    trips.changed = [name for name, given in ARGUMENTS.items() if not conversation.returns([given])]
    if trips.several and not conversation.returns([ARGUMENTS["plain"], ARGUMENTS["types"], {}]):
        trips.changed.append("several calls")
    for kind, where in conversation.differences():
        trips.differs.setdefault(kind, where)
    return trips


class _Conversation:
    """With a thought before each call and answer, where the template shows any."""

    def __init__(self, template: MessageTemplate, name: str) -> None:
        self.template, self.form, self.tokenizer = template, FORMATS[name], template.tokenizer
        self.opening = [_SYSTEM, _USER]
        try:
            template.render(self.opening, opens=True, tools=[TOOL])
        except NoTemplate:  # some take no system message
            self.opening = [_USER]

    def call(self, given: Sequence[Mapping[str, Any]], before: int = 0) -> dict[str, Any]:
        """The message of these calls, behind so many in the conversation."""
        assert self.template.calls is not None
        message = self.template.calls.message([("write_note", one) for one in given])
        calls = [
            {**one, "id": self.form.call_id("write_note", before + number)}
            for number, one in enumerate(message["tool_calls"])
        ]
        return {**message, "tool_calls": calls, "reasoning_content": _THOUGHT}

    def render(self, *messages: Any, opens: bool) -> str:
        return self.template.render([*self.opening, *messages], opens=opens, tools=[TOOL])

    def turn(self, message: Mapping[str, Any], *before: Any) -> tuple[str, str]:
        """(the prompt, what the model would sample behind it): the template's turn up to the token that ends it."""
        prompt, text = self.render(*before, opens=True), self.render(*before, message, opens=False)
        begin = next((one for one in (prompt, without_thinking(prompt)) if text.startswith(one)), None)
        if begin is not None:
            sampled = text[len(begin) :]
        else:  # the template writes earlier messages in another way once more follow
            told = (before or self.opening)[-1]["content"]
            header = without_thinking(prompt).rpartition(told)[2].rstrip()[-_HEADER:]
            rest = text.rpartition(told)[2]
            sampled = (rest.partition(header)[2] if header and header in rest else rest).lstrip()
        if (mark := open_thinking(prompt)) and begin != prompt:
            sampled = sampled.removeprefix(mark)
            if THINKING[mark] not in sampled:
                sampled = f"{_THOUGHT}{THINKING[mark]}{sampled}"
        before_end, mark, opening = sampled.partition(self.tokenizer.eos_token)
        if opening.strip() and prompt.endswith(opening):  # some open the next turn unasked
            sampled = before_end + mark
        special = [one for one in self.template.untrusted.special if one in sampled]
        end = max((sampled.rindex(one) + len(one) for one in special), default=0)
        return prompt, sampled[:end] if sampled[end:].isspace() else sampled

    def read(self, prompt: str, sampled: str) -> list[Any]:
        found = self.form.read(open_thinking(prompt) + sampled)
        try:
            parameters = TOOL["function"]["parameters"]
            return [(one.name, convert_arguments(one.name, parameters, one.arguments)) for one in found]
        except (ArgumentError, AttributeError):  # an Unreadable has no arguments
            return []

    def returns(self, given: Sequence[Mapping[str, Any]]) -> bool:
        """Whether calls come back as they were."""
        return self.read(*self.turn(self.call(given))) == [("write_note", one) for one in given]

    def results(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "tool", "content": text, "name": "write_note", "tool_call_id": call["id"]}
            for text, call in zip(_RESULTS, message["tool_calls"], strict=False)
        ]

    def differences(self) -> Iterator[tuple[str, str]]:
        """Where appended tokens differ from the conversation that is rendered at once."""
        assert self.template.calls is not None
        for count in (1, 2) if self.template.calls.several else (1,):
            given = [ARGUMENTS["plain"], ARGUMENTS["types"]][:count]
            said, again = self.call(given), self.call(given, before=count)
            answer = {"role": "assistant", "content": _FAREWELL, "reasoning_content": _THOUGHT}
            where = f"{count} result{'s' * (count > 1)}"
            text, before = self.render(opens=True), list[Any]()
            # A call and its results, another call and its results, then an answer and another message of the user.
            for words, turn, told in (
                (where, said, self.results(said)),
                (f"{where}, twice", again, self.results(again)),
                ("then the user", answer, [_MORE]),
            ):
                prompt, sampled = self.turn(turn, *before)
                text += sampled + self.behind(
                    prompt, sampled, told, sum(len(one.get("tool_calls", ())) for one in before)
                )
                before += [turn, *told]
                yield from self.compare(words, text, self.render(*before, opens=True))

    def behind(self, prompt: str, sampled: str, messages: Sequence[Mapping[str, Any]], calls_before: int) -> str:
        """What a run shows behind a turn. Of ids it knows those that the turn itself has."""
        last = self.template.untrusted.encode(sampled)[-1]
        told = [{key: one[key] for key in ("role", "content", "name") if key in one} for one in messages]
        if told[0]["role"] == "tool":
            ids = self.form.ids_of(self.form.read(open_thinking(prompt) + sampled), calls_before)
            told = [{**one, "tool_call_id": id} for one, id in zip(told, ids, strict=True)]
        return self.tokenizer.decode(self.template.ids(told, last, calls_before), skip_special_tokens=False)

    def compare(self, where: str, appended: str, whole: str) -> Iterator[tuple[str, str]]:
        if appended == whole:
            return
        first, second = _BLANKS.sub("", appended), _BLANKS.sub("", whole)
        if first == second:
            yield "blanks", where
            return
        first, second = _BLANKS.sub("", _THOUGHTS.sub("", appended)), _BLANKS.sub("", _THOUGHTS.sub("", whole))
        if first == second:
            yield "thinking", where
            return
        at = next(n for n, (a, b) in enumerate(zip(f"{first}\0", f"{second}\0", strict=False)) if a != b)
        at = max(0, at - 30)
        yield "text", f"{where}: {first[at : at + 90]} -> {second[at : at + 90]}"
