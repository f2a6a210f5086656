"""Over all formats of tool calls: no mark in the words of a turn, and no mark in a text of a call ends the call."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from call_templates import SPECIAL, tokenizer_of

from posttrain.conversations.format_proof import choose_format
from posttrain.conversations.formats import base
from posttrain.conversations.formats.base import FORMATS, THINKING, hide_json
from posttrain.conversations.formats.tags import Tags
from posttrain.conversations.serving.turns import TurnReader, TurnStream
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.arguments import convert_arguments
from posttrain.conversations.tools.base import ToolCall
from posttrain.rollout.base import Output

SAID, CALL = "I look it up.", ToolCall("write_note", {"text": "two words", "tags": ["x"]})
OTHER = ToolCall("now", {})
PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
}
THOUGHT = "Hm, I need a tool."
# (the beginning of a turn with thinking, what stands before words, what stands behind them if a call follows)
PARTS = {
    "cohere": (f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "functionary_v32": ("", "all\n", ""),
    "gigachat3": ("", "", "<|message_sep|>\n\n"),
    "harmony": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant",
        "<|channel|>commentary<|message|>",
        "<|end|><|start|>assistant",
    ),
    "kimi_k3": (
        f"<|open|>think<|sep|>{THOUGHT}<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
    ),
    "minicpm": (f"<|thought_start|>{THOUGHT}<|thought_end|>", "", ""),
    "muse_glimmer": (
        f" to=self<|message|>{THOUGHT}<|eom|><|start|>assistant",
        "<|message|>",
        "<|eom|><|start|>assistant",
    ),
    "solar_open": (f"<|think|>{THOUGHT}<|end|><|begin|>assistant", "<|content|>", "<|end|><|begin|>assistant"),
}  # fmt: skip
CALLS_ALONE = {"llama3_json", "llama_pythonic", "xlam"}  # a turn with calls has no words
TEXTS = {  # what a text may spell besides the format's own marks
    *THINKING, *THINKING.values(), "<|start|>", "<|message|>", "<|python_tag|>", "<|python_start|>", "<|call|>",
    "<|eom|>", "```", "```json", ">>>all\n", ">>>now\n{}", "<function=now>", "</function>", "<parameter=a>",
    "</parameter>", '"', "'", '"""', "'''", "\\", '\\"', "{", "}", "[", "]", "}]", "\n", ")", "]\n", "<",
    ">{", '>["<"]', "<arg_key>", "</arg_value>", "</invoke>", "<|message_sep|>", "<|role_sep|>", "[ARGS]",
    "<tool_sep:opensource>", "<|sep|>", "<|close|>argument<|sep|>", "</｜DSML｜parameter>", "</atem:parameter>",
    "</arg_value:opensource>", "<|tool_call:args|>", "<|tool_call_argument_begin|>", "<｜tool▁sep｜>",
}  # fmt: skip
# Texts stand as they are before a mark that nothing escapes, so that they cannot have it.
UNESCAPED = {"gemma4": '<|"|>', "functiongemma": "<escape>", "minimax_m3": "]<]minimax[>["}


def marks_of(name: str) -> list[str]:
    form = FORMATS[name]
    marks = {form.opening, form.closing, *(getattr(form, "block", None) or ())}
    return sorted(one for one in marks if one)


def turn_of(name: str, *written: str, thinks: bool) -> str:
    """A turn with words and these calls."""
    begin, before, behind = PARTS.get(name, (f"<think>{THOUGHT}</think>", "", ""))
    calls = "<|start|>assistant".join(written) if name in ("harmony", "muse_glimmer") else "".join(written)
    behind = behind if written else re.sub(r"<\|(?:start|begin)\|>assistant$", "", behind)
    return (begin if thinks else "") + before + SAID + behind + calls


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_words_of_a_turn_with_calls_have_no_marks(name, thinks, calls):
    form = FORMATS[name]
    if name in CALLS_ALONE:
        turn = (f"<think>{THOUGHT}</think>" if thinks else "") + form.write(CALL)
        assert form.split(turn, has_calls=True) == (THOUGHT if thinks else "", "")
        return
    turn = turn_of(name, *[FORMATS[name].write(CALL)] * calls, thinks=thinks)
    found = [one for one in form.read(turn) if isinstance(one, ToolCall)]
    assert [one.name for one in found] == ["write_note"] * calls
    assert form.split(turn, has_calls=True) == (THOUGHT if THOUGHT in turn else "", SAID)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_words_of_an_answer_have_no_marks(name, thinks):
    turn = turn_of(name, thinks=thinks)
    assert FORMATS[name].read(turn) == []
    assert FORMATS[name].split(turn, has_calls=False) == (THOUGHT if THOUGHT in turn else "", SAID)


def test_the_newer_marks_of_cohere_are_none_of_the_words():
    assert FORMATS["cohere"].split(f"<|START_TEXT|>{SAID}<|END_TEXT|>", has_calls=False) == ("", SAID)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_words_that_are_streamed_are_the_beginning_of_the_words_of_the_turn(name, calls):
    """A token at a time: special tokens come whole, everything else in bytes."""
    tokenizer = tokenizer_of("Qwen3")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    written = [FORMATS[name].write(CALL)] * calls
    turn = written[0] if calls and name in CALLS_ALONE else turn_of(name, *written, thinks=True)
    reader = TurnReader(tokenizer, FORMATS[name], (), (), {"write_note": {"parameters": PARAMETERS}}, "")
    ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
    whole = reader.read(Output(0, ids, np.zeros(len(ids), np.float32), "stop"))
    assert len(whole.calls) == calls and whole.text == ("" if name in CALLS_ALONE and calls else SAID)
    stream, words = TurnStream(reader, 0), ""
    for one in ids:
        words += stream.feed([one], [0.0]).text
        assert whole.text.startswith(words)
    assert words or not (FORMATS[name].streams and FORMATS[name].opening)


def test_results_behind_a_call_of_a_tool_with_the_name_python_are_rendered_by_functionary():
    """Its template writes such a call as code, without the closing mark."""
    tokenizer = tokenizer_of("Functionary v3.1")
    template = MessageTemplate(tokenizer)
    choose_format(template, "auto")
    ids = template.ids([{"role": "tool", "content": "4", "name": "python"}], -1)
    assert str(tokenizer.decode(ids, skip_special_tokens=False)).startswith("<|eom_id|><|start_header_id|>ipython")


@pytest.mark.parametrize("name", FORMATS)
def test_marks_in_a_text_do_not_end_the_call(name):
    form, failed = FORMATS[name], list[str]()
    for mark in [*sorted(TEXTS), *marks_of(name), form.write(OTHER), form.write(CALL)]:
        for text in (mark, f"a {mark} b", f"{mark}{mark}", f'{{"x": "{mark}'):
            given = (
                {"tags": [text, "z"]}
                if isinstance(form, Tags) and name != "minicpm5"
                else {"text": text, "tags": [text, "z"]}
            )
            if name in UNESCAPED and UNESCAPED[name] in text:
                continue
            turn = form.write(ToolCall("write_note", given))
            turn = turn_of(name, turn, thinks=False) if name not in CALLS_ALONE else turn
            found = [one.arguments for one in form.read(turn) if isinstance(one, ToolCall)]
            if [convert_arguments("write_note", PARAMETERS, one) for one in found] != [given]:
                failed.append(text)
            if form.split(turn, has_calls=True)[1] != ("" if name in CALLS_ALONE else SAID):
                failed.append(text)
    assert not failed


def test_json_that_is_broken_again_and_again_is_not_read_for_ever(monkeypatch):
    class Counting(json.JSONDecoder):
        tries = 0

        def raw_decode(self, s: str, idx: int = 0):
            Counting.tries += 1
            return super().raw_decode(s, idx)

    monkeypatch.setattr(base, "_DECODER", Counting())
    broken, sound = ">{" * 10_000, '>["<"]'
    assert hide_json(broken)[0] == broken and Counting.tries == 100
    hidden, spare = hide_json(sound * 1000)
    assert hidden == f'>["{spare}"]' * 1000, "what can be read does not count"
