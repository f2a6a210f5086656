"""Calls as models write them, and what tools say as tokens behind a turn."""

from __future__ import annotations

import json

import pytest

from posttrain.conversations.formats.base import FORMATS, Unreadable
from posttrain.conversations.settings import FORMATS as NAMED
from posttrain.conversations.templates import MessageTemplate, NoToolsInTemplate
from posttrain.conversations.tools.base import ToolCall
from posttrain.models.embedded import byte_tokenizer

CHATML = (  # with tools as Qwen2.5 shows them: their answers are a user's turn, several of them one
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SCHEMA = {"type": "function", "function": {"name": "add", "description": "The sum.", "parameters": {}}}


def chatml(template: str = CHATML):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def test_calls_are_read_in_order_with_their_arguments_also_as_text_and_without_an_end():
    text = (
        'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and '
        f"<tool_call>{json.dumps({'name': 'b', 'arguments': json.dumps({'x': [2]})})}</tool_call>"
        '<tool_call>{"name": "c"}'
    )
    assert FORMATS["hermes"].read(text) == [ToolCall("add", {"a": 1}), ToolCall("b", {"x": [2]}), ToolCall("c", {})]
    assert FORMATS["hermes"].read("no call") == [] and tuple(FORMATS) == NAMED


@pytest.mark.parametrize("inside", ["", "[]", "7", "{}", '{"name": 3}', '{"name": "a", "arguments": []}', "[" * 10_000])
def test_what_is_no_call_is_said_to_be_none(inside):
    (found,) = FORMATS["hermes"].read(f"<tool_call>{inside}</tool_call>")
    assert isinstance(found, Unreadable) and "tool call" in str(found)


def test_calls_of_llama_are_turns_of_nothing_else_and_json_that_is_no_call_is_an_answer():
    one = '{"name": "add", "parameters": {"a": 1}}'
    add = ToolCall("add", {"a": 1})
    assert FORMATS["llama3_json"].read(one) == FORMATS["llama3_json"].read(f" {one}<|eot_id|>") == [add]
    assert FORMATS["llama3_json"].read(f"Let me see.<|python_tag|>{one}<|eom_id|>") == [add]
    several = f'{one}; {{"name": "b", "arguments": {{"x": [2]}}}}\n{{"name": "c", "parameters": "{{}}"}}<|eot_id|>'
    assert FORMATS["llama3_json"].read(several) == [add, ToolCall("b", {"x": [2]}), ToolCall("c", {})]
    for answer in ("", "5", "{1, 2} is a set", '{"name": "Bob"}', '{"answer": 5}', f"I could say {one}", "[5]"):
        assert FORMATS["llama3_json"].read(answer) == [], answer
    for broken in ('{"name": "add", "param', '<|python_tag|>print("x")', "<|python_tag|>{}", one.replace('"add"', "3")):
        (found,) = FORMATS["llama3_json"].read(broken)
        assert isinstance(found, Unreadable) and "tool call" in str(found), broken


def nested(depth: int) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name, key", [("hermes", "arguments"), ("llama3_json", "parameters")])
def test_arguments_nested_deeper_than_64_are_no_call_and_others_are(name, key, as_text):
    for depth, readable in ((1, True), (63, True), (64, True), (65, False), (300, False), (500, False), (5000, False)):
        arguments = json.dumps(nested(depth)) if as_text else nested(depth)
        text = f'{{"name": "add", "{key}": {arguments}}}'
        (found,) = FORMATS[name].read(f"<tool_call>{text}</tool_call>" if name == "hermes" else text)
        assert isinstance(found, ToolCall) == readable, depth
        assert readable or isinstance(found, Unreadable)
        if 64 < depth < 500:
            assert str(found) == f'The "{key}" of a tool call may be nested 64 deep at most.'


def test_calls_of_a_turn_are_read_where_they_stand_and_not_from_copies_of_the_rest(monkeypatch):
    """Thousands of objects in one turn: the JSON reader is given one text, at growing places in it."""
    plain, seen = json.JSONDecoder.raw_decode, []

    def watched(self, text, at=0):
        seen.append((text, at))
        return plain(self, text, at)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", watched)
    assert len(FORMATS["llama3_json"].read("<|python_tag|>" + "{}" * 3000)) == 3000
    assert len({id(text) for text, _ in seen}) == 1 and [at for _, at in seen] == list(range(0, 6000, 2))
    assert len(FORMATS["llama3_json"].read('{"name": "a", "parameters": {}}; \n' * 3000)) == 3000


LLAMA3 = (  # tools in the user's turn, answers of tools as a turn of their own, quoted
    "{{ '<|begin|>' }}{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>ipython\n\n' + (m['content'] | tojson) + '<|im_end|>' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n\n' }}{% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    "{{ m['content'] | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["hermes", "llama3_json"])
@pytest.mark.parametrize("answers", [["5"], ["5", "six"]])
def test_tokens_behind_a_turn_are_those_of_the_whole_conversation_rendered_at_once(answers, template):
    tokenizer = chatml(template)
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    asked = [{"role": "user", "content": "2 + 3?"}]
    first = tokenizer.apply_chat_template(asked, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    said = [*asked, {"role": "assistant", "content": "a call"}, *({"role": "tool", "content": one} for one in answers)]
    whole = tokenizer.apply_chat_template(said, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    written = [*encode(first), *encode("a call")]
    template, told = MessageTemplate(tokenizer), [{"role": "tool", "content": one} for one in answers]
    assert [*written, end, *template.ids(told, end)] == encode(whole)
    assert [*written, *template.ids(told, written[-1])] == encode(whole), "a turn that a stop text cut is ended"


@pytest.mark.parametrize(
    "template, words",
    [
        (None, "has no chat template"),
        (CHATML.replace("m['content'] + '\n</tool_response>'", "'</tool_response>'"), "leaves out what a tool answers"),
        ("{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
         "{{ m['content'] }}{% endfor %}", "refuses messages of the role `tool`"),
        (CHATML.replace("m['content'] + '<|im_end|>\n'", "m['content'] + '<|im_end|>' + messages | length | string"),
         "in another way once a tool has answered"),
    ],
    ids=["none", "deaf", "refuses", "rewrites"],
)  # fmt: skip
def test_templates_that_tools_cannot_be_used_with_are_refused_in_words(template, words):
    with pytest.raises(NoToolsInTemplate, match=words):
        MessageTemplate(chatml(template)).check_tools([SCHEMA])


def test_a_template_that_hides_a_tool_is_refused():
    MessageTemplate(chatml()).check_tools([SCHEMA])
    with pytest.raises(NoToolsInTemplate, match="does not show add"):
        MessageTemplate(chatml(CHATML.replace("{% if tools %}", "{% if false %}"))).check_tools([SCHEMA])
