"""Every format reads the calls of its models, is proved by their chat templates, and is found by `auto`."""

# ruff: noqa: E501 (marks of formats are long)
from __future__ import annotations

from pathlib import Path

import pytest
from call_templates import TEMPLATES, chatml, tokenizer_of
from fuzzed_turns import read_all

from posttrain.conversations.format_proof import WrongFormat, choose_format, prove_formats
from posttrain.conversations.formats.base import FORMATS, Unreadable
from posttrain.conversations.settings import FORMATS as NAMED
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.base import ToolCall

SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
CALL = ToolCall("add", {"a": 1, "b": "two words"})


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_proves_its_own_format_and_no_other(family):
    template, fitting = MessageTemplate(tokenizer_of(family)), TEMPLATES[family][1]
    assert list(prove_formats(template).forms) == [fitting]
    assert choose_format(template, "auto") == (fitting, "")
    template.check_tools([SCHEMA])
    wrong = "hermes" if fitting != "hermes" else "glm"
    with pytest.raises(WrongFormat, match=rf"format={wrong} does not read .*(?s:.*)format={fitting}, or leave it out"):
        choose_format(MessageTemplate(tokenizer_of(family)), wrong)


@pytest.mark.parametrize("answers", [1, 2])
@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_behind_a_turn_are_those_of_the_whole_conversation(family, answers):
    """The prompt, the model's turn as the template writes it, and the results give the text of the conversation."""
    tokenizer = tokenizer_of(family)
    template = MessageTemplate(tokenizer)
    choose_format(template, "auto")
    assert template.calls is not None
    answers = answers if template.calls.several else 1
    asked = {"role": "user", "content": "2 + 3?"}
    said = template.calls.message([("add", {"a": 1, "b": "x"}), ("mul", {"a": 2, "b": "y"})][:answers])
    results = [
        {"role": "tool", "content": f"result {n}", "name": call["function"]["name"], "tool_call_id": call["id"]}
        for n, call in enumerate(said["tool_calls"])
    ]
    whole = template.render([asked, said, *results], opens=True, tools=[SCHEMA])
    told = [{key: one[key] for key in ("role", "content", "name")} for one in results]
    behind = tokenizer.decode(template.ids(told, -1), skip_special_tokens=False)
    assert whole.endswith(behind), "a turn that a stop text cut is ended"
    before = whole.removesuffix(behind)
    assert before.rstrip().endswith(FORMATS[TEMPLATES[family][1]].closing) or family.startswith("Mistral")
    # Where the model sampled the token that ends its turn, the results follow that token.
    last = next((one for one in template.untrusted.special if behind.startswith(one)), None)
    assert last is not None
    if family != "Llama 4, pythonic":  # its turns end with two of them
        sampled = tokenizer.convert_tokens_to_ids(last)
        assert before + last + tokenizer.decode(template.ids(told, sampled), skip_special_tokens=False) == whole


def test_the_token_that_begins_a_result_in_glm_is_not_written_twice():
    tokenizer = tokenizer_of("GLM 4.5")
    template = MessageTemplate(tokenizer)
    choose_format(template, "auto")
    sampled = tokenizer.convert_tokens_to_ids("<|observation|>")
    behind = tokenizer.decode(template.ids([{"role": "tool", "content": "4"}], sampled), skip_special_tokens=False)
    assert behind == "\n<tool_response>\n4\n</tool_response><|assistant|>"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_what_it_writes_and_no_call_that_is_quoted_in_thinking(name):
    form = FORMATS[name]
    (found,) = form.read(form.write(CALL))
    assert isinstance(found, ToolCall) and found.name == "add"
    assert {key: str(value) for key, value in found.arguments.items()} == {"a": "1", "b": "two words"}
    if name == "harmony":  # thinking is a channel there
        thought = "<|channel|>analysis<|message|>I could write to=functions.add {}<|end|><|start|>assistant"
    else:
        thought = f"<think>I could write {form.write(CALL)} here.</think>"
    assert form.read(thought) == form.read("") == form.read("The answer is 5.") == []
    assert form.read(thought + form.write(CALL)) == [found]
    if name != "harmony":
        assert form.read(f"<think>never closed {form.write(CALL)}") == []


@pytest.mark.parametrize("name", FORMATS)
def test_fuzzed_turns_never_raise_and_take_no_time(name):
    _, _, longest = read_all(name, 300)
    assert longest < 2.0


TURNS = {
    "hermes": [
        ('<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>',
         [ToolCall("write", {"text": "</tool_call>"})]),
    ],
    "qwen3_coder": [
        ("Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
         "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
         [ToolCall("add", {"a": "1", "b": "x\ny"}), ToolCall("now", {})]),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1", [ToolCall("add", {"a": "1"})]),
    ],
    "glm": [
        ("<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
         [ToolCall("add", {"a": "1"})]),
        ("<tool_call>now</tool_call>", [ToolCall("now", {})]),
        ("<tool_call>now<|observation|>", [ToolCall("now", {})]),
    ],
    "minimax_m2": [
        ('<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
         '<invoke name="now">\n</invoke>\n</minimax:tool_call>', [ToolCall("add", {"a": "1"}), ToolCall("now", {})]),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abc123abc"}, {"name": "now", "arguments": {}}]</s>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('I look.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[CALL_ID]abc123abc[ARGS]{}</s>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('[THINK][TOOL_CALLS]add[ARGS]{"a": 1}[/THINK]5', []),
    ],
    "deepseek_v3": [
        ('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
         '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "kimi_k2": [
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.add:3<|tool_call_argument_begin|>{"a": 1}'
         "<|tool_call_end|><|tool_call_begin|> now <|tool_call_argument_begin|>{}<|tool_call_end|>",
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "harmony": [
        ('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.add '
         '<|constrain|>json<|message|>{"a": 1}<|call|>', [ToolCall("add", {"a": 1})]),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', [ToolCall("add", {"a": 1})]),
        ("<|channel|>final<|message|>5<|return|>", []),
    ],
    "llama_pythonic": [
        ("[add(a=-1, b='x', c=[1, {'d': None}], e=true), time.now()]<|eot_id|>",
         [ToolCall("add", {"a": -1, "b": "x", "c": [1, {"d": None}], "e": True}), ToolCall("time.now", {})]),
        ("[1, 2]", []), ("[1, add(a=1)]", []), ("Look: [add(a=1)]", []),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "turn", "calls"), [(n, *one) for n, those in TURNS.items() for one in those])
def test_calls_are_read_as_the_family_writes_them(name, turn, calls):
    assert FORMATS[name].read(turn) == calls


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>'),
        ("glm", '<tool_call>{"name": "add"}</tool_call>'),
        ("minimax_m2", "<minimax:tool_call>add</minimax:tool_call>"),
        ("mistral", "[TOOL_CALLS]add(1)"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>1<｜tool▁call▁end｜>x<｜tool▁call▁begin｜>"),
        ("kimi_k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>{<|call|>"),
        ("llama_pythonic", "[add(1)]"),
        ("llama_pythonic", "[add(a=open('x'))]"),
        ("llama_pythonic", "[add(a=" + "(" * 5000),
        ("llama_pythonic", "[add(a=" + "-" * 50_000 + "1)]"),
    ],
)
def test_what_cannot_be_read_tells_the_model_how_a_call_is_written(name, turn):
    found = FORMATS[name].read(turn)
    assert found and isinstance(found[-1], Unreadable) and "tool call" in str(found[-1])


def test_a_template_that_writes_no_calls_proves_nothing_and_one_that_no_format_reads_is_refused():
    tokenizer = tokenizer_of("Qwen2.5")
    tokenizer.chat_template = chatml("")
    name, note = choose_format(MessageTemplate(tokenizer), "auto")
    assert name == "hermes" and "does not write tool calls" in note
    assert choose_format(MessageTemplate(tokenizer), "glm")[0] == "glm"
    tokenizer.chat_template = chatml("CALL {{ c.function.name }} WITH {{ c.function.arguments }}")
    with pytest.raises(WrongFormat, match=r"no format of tool calls reads .*(?s:.*)CALL probe_tool WITH"):
        choose_format(MessageTemplate(tokenizer), "auto")


def test_every_format_is_proved_by_a_template_and_has_its_row_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "call_formats.md").read_text()
    assert {fitting for _, fitting in TEMPLATES.values()} == set(FORMATS) == set(NAMED)
    for name, form in FORMATS.items():
        assert f"| `{name}` | {form.models} |" in page
