"""Every format reads the calls of its models, is proved by their chat templates, and is found by `auto`."""

# ruff: noqa: E501 (marks of formats are long)
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from call_templates import JSON_CALL, TEMPLATES, chatml, tokenizer_of
from fuzzed_turns import read_all
from test_real_templates import EXPECTED

from posttrain.conversations.format_proof import WrongFormat, choose_format, prove_formats
from posttrain.conversations.formats.base import FORMATS, THINKING, Unreadable, open_thinking, without_thinking
from posttrain.conversations.serving.turns import TurnReader
from posttrain.conversations.settings import FORMATS as NAMED
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.base import ToolCall
from posttrain.rollout.base import Output

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


def test_equal_messages_of_many_formats_are_rendered_once(monkeypatch):
    """Each run with tools begins with this proof."""
    rendered, render = [], MessageTemplate.render

    def noted(self, messages, **more):
        rendered.append((repr(messages), repr(more)))
        return render(self, messages, **more)

    monkeypatch.setattr(MessageTemplate, "render", noted)
    prove_formats(MessageTemplate(tokenizer_of("Qwen2.5")))
    of_turns = [one for one in rendered if "'opens': False" in one[1] and "probe_tool" in one[0]]
    assert len(set(of_turns)) == len(of_turns) < len(FORMATS)


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
    last = next((one for one in template.untrusted.special if behind.lstrip().startswith(one)), None)
    assert last is not None
    if family not in ("Llama 4, pythonic", "Kimi K3", "Nemotron Nano v2"):  # turns end with several, or behind a line
        sampled = tokenizer.convert_tokens_to_ids(last)
        assert before + last + tokenizer.decode(template.ids(told, sampled), skip_special_tokens=False) == whole


def test_a_template_that_opens_a_turn_behind_every_message_is_continued_behind_the_end_of_the_turn():
    tokenizer = tokenizer_of("Command R7B")
    template, end = MessageTemplate(tokenizer), "<|END_OF_TURN_TOKEN|>"
    said = f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>More.{end}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    for last, behind in ((-1, f"<|END_RESPONSE|>{end}{said}"), (tokenizer.convert_tokens_to_ids(end), said)):
        ids = template.ids([{"role": "user", "content": "More."}], last)
        assert tokenizer.decode(ids, skip_special_tokens=False) == behind


def test_the_token_that_begins_a_result_in_glm_is_not_written_twice():
    tokenizer = tokenizer_of("GLM 4.5")
    template = MessageTemplate(tokenizer)
    choose_format(template, "auto")
    sampled = tokenizer.convert_tokens_to_ids("<|observation|>")
    behind = tokenizer.decode(template.ids([{"role": "tool", "content": "4"}], sampled), skip_special_tokens=False)
    assert behind == "\n<tool_response>\n4\n</tool_response><|assistant|>"


@pytest.mark.parametrize("family", ["Kimi K2", "DeepSeek-V3.1"])
def test_a_turn_that_a_stop_text_cut_behind_its_calls_is_ended(family):
    """Its last token is a control token, but not the one that ends a turn."""
    tokenizer = tokenizer_of(family)
    template = MessageTemplate(tokenizer)
    name, _ = choose_format(template, "auto")
    told, last = [{"role": "tool", "content": "4"}], tokenizer.convert_tokens_to_ids(FORMATS[name].closing)
    assert last in tokenizer.all_special_ids
    assert template.ids(told, last) == template.ids(told, -1)
    assert template.ids(told, last)[1:] == template.ids(told, template.ids(told, last)[0])


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_what_it_writes_and_no_call_that_is_quoted_in_thinking(name):
    form = FORMATS[name]
    (found,) = form.read(form.write(CALL))
    assert isinstance(found, ToolCall) and found.name == "add"
    assert {key: str(value) for key, value in found.arguments.items()} == {"a": "1", "b": "two words"}
    thought = {  # thinking is a channel there, or a message to itself
        "harmony": "<|channel|>analysis<|message|>I could write to=functions.add {}<|end|><|start|>assistant",
        "muse_glimmer": ' to=self<|message|>I could write <atem:invoke name="add"></atem:invoke><|eom|><|start|>assistant',
    }.get(name, f"<think>I could write {form.write(CALL)} here.</think>")
    assert form.read(thought) == form.read("") == form.read("The answer is 5.") == []
    assert form.read(thought + form.write(CALL)) == [found]
    if name not in ("harmony", "muse_glimmer"):
        assert form.read(f"<think>never closed {form.write(CALL)}") == []


@pytest.mark.parametrize("added", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("mark", THINKING)
def test_a_prompt_that_opens_thinking_is_recognized_by_each_mark(mark, added):
    """A call that the model quotes in the thinking that its prompt has opened is none."""
    tokenizer = tokenizer_of("Qwen3")
    if added:
        tokenizer.add_tokens(["<think>", mark if mark == "[THINK]" else mark[: mark.index(">") + 1]])
    form, call = FORMATS["hermes"], FORMATS["hermes"].write(CALL)
    ids = tokenizer(f"<|im_start|>assistant\n{mark}\n", add_special_tokens=False)["input_ids"]
    reader = TurnReader.of(tokenizer, form, (), ids, stop=(), tools={"add": SCHEMA["function"]})
    thought = tokenizer(f"{call}{THINKING[mark]}5", add_special_tokens=False)["input_ids"]
    turn = reader.read(Output(0, thought, np.zeros(len(thought), np.float32), "stop"))
    assert (turn.text, turn.thinking, turn.calls) == ("5", call, [])
    assert open_thinking(f"a{mark}\n") == mark and open_thinking(f"{mark}{THINKING[mark]}") == ""
    assert without_thinking(f"a\n{mark}\n\n{THINKING[mark]}\n\n") == without_thinking(f"a\n{mark}\n") == "a\n"


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
    "deepseek_v32": [
        ('Look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
         '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls><｜end▁of▁sentence｜>',
         [ToolCall("add", {"a": 1, "b": "2"}), ToolCall("now", {})]),
    ],
    "gemma4": [
        ('<|tool_call>call:add{a:1,b:<|"|>x: {y}, <b>"z"<|"|>,c:{d:[true,None,<|"|>e<|"|>]}}<tool_call|><|tool_call>call:now{}'
         "<tool_call|><|tool_response>",
         [ToolCall("add", {"a": 1, "b": 'x: {y}, <b>"z"', "c": {"d": [True, None, "e"]}}), ToolCall("now", {})]),
    ],
    "kimi_k3": [
        ('<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1'
         '<|close|>argument<|sep|><|open|>argument key="b&quot;" type="string"<|sep|>2<|close|>argument<|sep|><|close|>call'
         '<|sep|><|open|>call tool="now" index="2"<|sep|><|open|>json type="object"<|sep|>{"c": 3}<|close|>json<|sep|>'
         "<|close|>call<|sep|><|close|>tools<|sep|>", [ToolCall("add", {"a": 1, 'b"': "2"}), ToolCall("now", {"c": 3})]),
    ],
    "minimax_m3": [
        (']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="add">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[<b>'
         "]<]minimax[>[<item>x]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<c>y]<]minimax[>[</c>]<]minimax[>[</item>"
         ']<]minimax[>[</b>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n'
         "]<]minimax[>[</tool_call>", [ToolCall("add", {"a": "1", "b": ["x", {"c": "y"}]}), ToolCall("now", {})]),
    ],
    "seed_oss": [
        ("<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=b>x\ny"
         "</parameter>\n</function>\n</seed:tool_call>", [ToolCall("add", {"a": "1", "b": "x\ny"})]),
    ],
    "hy3": [
        ("<tool_calls:opensource>\n<tool_call:opensource>add<tool_sep:opensource>\n<arg_key:opensource>a</arg_key:opensource>"
         "\n<arg_value:opensource>1</arg_value:opensource>\n</tool_call:opensource>\n<tool_call:opensource>now"
         "<tool_sep:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
         [ToolCall("add", {"a": "1"}), ToolCall("now", {})]),
    ],
    "muse_glimmer": [
        (' to=self<|message|><atem:invoke name="no"></atem:invoke><|eom|><|start|>assistant to=add<|message|>'
         '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
         '</atem:function_calls><|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n'
         "</atem:invoke>\n</atem:function_calls><|eot|>", [ToolCall("add", {"a": "1"}), ToolCall("now", {})]),
    ],
    "apertus": [
        ('Look.<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "functiongemma": [
        ("<start_function_call>call:add{a:1,b:<escape>x, {y}<escape>,c:[<escape>z<escape>]}<end_function_call>\n"
         "<start_function_call>call:now{}<end_function_call>",
         [ToolCall("add", {"a": 1, "b": "x, {y}", "c": ["z"]}), ToolCall("now", {})]),
    ],
    "xlam": [
        ('<think>[{"name": "no", "arguments": {}}]</think>\n[{"name": "add", "arguments": {"a": 1}}, '
         '{"name": "now", "arguments": {}}]<|im_end|>', [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ("[]", []), ("[1, 2]", []), ('[{"name": "Ada", "age": 3}]', []), ('Look: [{"name": "add", "arguments": {}}]', []),
    ],
    "granite": [
        ('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]<|end_of_text|>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "apriel": [
        (' Look.<tool_calls>[\n    {"name": "add", "arguments": {"a": 1}},\n    {"name": "now", "arguments": {}}\n]</tool_calls>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('Look.\n<tool_calls>\n{"name": "add", "arguments": {"a": 1}}\n{"name": "now", "arguments": {}}\n</tool_calls>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "nemotron_v2": [
        ('<TOOLCALL>[{"name": "write", "arguments": {"text": "</TOOLCALL>"}}]</TOOLCALL><SPECIAL_12>',
         [ToolCall("write", {"text": "</TOOLCALL>"})]),
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
        ("Look.<|tool_call_start|>[add(a=1)]<|tool_call_end|><|im_end|>", [ToolCall("add", {"a": 1})]),
        ("[1, 2]", []), ("[1, add(a=1)]", []), ("Look: [add(a=1)]", []),
    ],
    "cohere": [
        ('<|START_THINKING|>I add with <|START_ACTION|>.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", '
         '"tool_name": "add", "parameters": {"a": 1}},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]'
         "<|END_ACTION|><|END_OF_TURN_TOKEN|>", [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ("<|START_RESPONSE|>5<|END_RESPONSE|>", []),
        ("<|START_TEXT|>5<|END_TEXT|>", []),
    ],
    "functionary_v31": [
        ('Look.<function=add>{"a": 1}</function><function=now>{}</function><|eom_id|>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('<function=add>{"a": 1}', [ToolCall("add", {"a": 1})]),
    ],
    "functionary_v32": [
        ('all\nLook.>>>add\n{"a": 1}>>>now\n{}<|eot_id|>', [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('add\n{"a": 1}<|eot_id|>', [ToolCall("add", {"a": 1})]),
        ('add\n{"text": ">>>now\\n{}"}', [ToolCall("add", {"text": ">>>now\n{}"})]),
        ("all\nPython shows:\n>>> 1 + 1\n2<|eot_id|>", []),
    ],
    "gigachat3": [
        ('Look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "add", "arguments": {"a": 1}}<|message_sep|>\n\n',
         [ToolCall("add", {"a": 1})]),
        ("A function call is a message.<|message_sep|>", []),
    ],
    "gigachat31": [
        ('Look.<|function_call|>{"name": "add", "arguments": {"a": 1}}<|message_sep|>\n\n', [ToolCall("add", {"a": 1})]),
    ],
    "granite_20b_fc": [
        ('<function_call> {"name": "add", "arguments": {"a": 1}}<function_call> {"name": "now", "arguments": {}}'
         "<|endoftext|>", [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('<function_call> {"name": "add", "arguments": {"a": 1}}\n<function_call> {"name": "now", "arguments": {}}'
         "<|endoftext|>", [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "internlm2": [
        ('Look.<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|>\n'
         '<|action_start|> <|plugin|>\n{"name": "now", "arguments": {}}<|action_end|><|im_end|>',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ('<|action_start|><|plugin|>{\n  "name": "add",\n  "parameters": {"a": 0.5, "b": ["\\"x\\""], "c": {}}\n}<|action_end|>',
         [ToolCall("add", {"a": 0.5, "b": ['"x"'], "c": {}})]),
    ],
    "longcat": [
        ('<longcat_tool_call>{\n  "name": "add",\n  "arguments": {"a": null, "b": ["x"], "c": {"d": []}}\n}</longcat_tool_call>\n'
         "That is all.", [ToolCall("add", {"a": None, "b": ["x"], "c": {"d": []}})]),
        ('Look.\n<longcat_tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</longcat_tool_call>\n'
         '<longcat_tool_call>{"name": "now", "arguments": {}}',
         [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
    ],
    "minicpm": [
        ("<|thought_start|>\nI add.\n<|thought_end|>\n<|tool_call_start|>\n```python\nadd(a=-1, b=\"x\\n'y'\", c=[true, None])\n"
         "now()\n```\n<|tool_call_end|>\nWait.<|im_end|>",
         [ToolCall("add", {"a": -1, "b": "x\n'y'", "c": [True, None]}), ToolCall("now", {})]),
        ("<|tool_call_start|>\n```python\nadd(a=1)", [ToolCall("add", {"a": 1})]),
    ],
    "minicpm5": [
        ('Look.\n<function name="add">\n<param name="a">1</param>\n<param name="b"><![CDATA[    x < y:\n</param></function>\n]]></param>'
         '</function>\n<function name="now"></function><|im_end|>',
         [ToolCall("add", {"a": "1", "b": "    x < y:\n</param></function>\n"}), ToolCall("now", {})]),
        ("<function name='add'><param name='a'>[1, {'b': None}]</param>", [ToolCall("add", {"a": "[1, {'b': None}]"})]),
        ('<function name="add"><param name="a">1<param name="b"><![CDATA[x]] > y', [ToolCall("add", {"a": "1", "b": "x]] > y"})]),
    ],
    "olmo3": [
        ("<function_calls>add(a=37, b={'c': 'd e'}, f=null, g=true, h=[])\nnow()\nwrite(text='it\\'s \\\"x\\\"')</function_calls>",
         [ToolCall("add", {"a": 37, "b": {"c": "d e"}, "f": None, "g": True, "h": []}), ToolCall("now", {}),
          ToolCall("write", {"text": "it's \"x\""})]),
        ('Look.\n<function_calls>\nadd(a=1, b="""x\n</function_calls>""")\nnow()\n</function_calls><|im_end|>',
         [ToolCall("add", {"a": 1, "b": "x\n</function_calls>"}), ToolCall("now", {})]),
    ],
    "solar_open": [
        ('<|think|>I add.<|end|><|begin|>assistant<|content|>Look.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>'
         'a1b2<|tool_call:name|>add<|tool_call:args|>{"a": 1}<|tool_call:end|><|tool_call:begin|>c3<|tool_call:name|>now'
         "<|tool_call:args|>{}<|tool_call:end|><|calls|>", [ToolCall("add", {"a": 1}), ToolCall("now", {})]),
        ("<|think|>I could use <|tool_call:begin|>x<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>", []),
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
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">{</｜DSML｜parameter>'),
        ("deepseek_v32", "<｜DSML｜invoke>"),
        ("gemma4", "<|tool_call>call:f{a:<|"),
        ("gemma4", "<|tool_call>f(a=1)<tool_call|>"),
        (
            "kimi_k3",
            '<|open|>call tool="f"<|sep|><|open|>argument key="a" type="number"<|sep|>{<|close|>argument<|sep|>',
        ),
        ("kimi_k3", "<|open|>call f<|close|>call<|sep|>"),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</b>'),
        ("minimax_m3", ']<]minimax[>[<invoke name="f">]<]minimax[>[<a>' * 300),
        ("seed_oss", "<seed:tool_call>add(1)</seed:tool_call>"),
        ("hy3", "<tool_call:opensource>add(1)</tool_call:opensource>"),
        ("muse_glimmer", " to=add<|message|><atem:invoke>add(1)</atem:invoke>"),
        ("apertus", '<|tools_prefix|>[{"name": "add", "arguments": {}}]<|tools_suffix|>'),
        ("apertus", "<|tools_prefix|>add(1)<|tools_suffix|>"),
        ("functiongemma", "<start_function_call>call:add{a:<escape>1"),
        ("xlam", '[{"name": "add", "arguments": {"a"'),
        ("granite", "<|tool_call|>add(1)"),
        ("apriel", "<tool_calls>add(1)</tool_calls>"),
        ("nemotron_v2", "<TOOLCALL>[{</TOOLCALL>"),
        ("llama_pythonic", "[add(1)]"),
        ("llama_pythonic", "[add(a=open('x'))]"),
        ("llama_pythonic", "[add(a=" + "(" * 5000),
        ("llama_pythonic", "[add(a=" + "-" * 50_000 + "1)]"),
        ("cohere", '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1'),
        ("cohere", '<|START_ACTION|>[{"name": "add", "arguments": {}}]<|END_ACTION|>'),
        ("functionary_v31", "<function=add>{"),
        ("functionary_v31", "<|python_tag|>print(1)<|eom_id|>"),
        ("functionary_v32", 'all\nLook.>>>add\n{"a": '),
        ("functionary_v32", ">>>python\nprint(1)"),
        ("gigachat3", "function call<|role_sep|>\nadd(1)"),
        ("gigachat31", "<|function_call|>add(1)"),
        ("granite_20b_fc", '<function_call> {"name": "add", "arguments": {'),
        ("internlm2", '<|action_start|><|plugin|>{"name": "add", "parameters": "5"}<|action_end|>'),
        ("internlm2", "<|action_start|><|plugin|>"),
        ("longcat", '<longcat_tool_call>{"name": "add", "arguments": {'),
        ("longcat", '<longcat_tool_call>{"name": "add", "arguments": "none"}</longcat_tool_call>'),
        ("minicpm5", "<function name=add(1)</function>"),
        ("internlm2", "<|action_start|><|interpreter|>\n```python\nprint(1)\n```<|action_end|>"),
        ("internlm2", '<|action_start|><|plugin|>\n{"name": "add", "parameters": {'),
        ("longcat", "<longcat_tool_call>add(1)</longcat_tool_call>"),
        ("minicpm", "<|tool_call_start|>\n```python\nadd(a=open('x'))\n```\n<|tool_call_end|>"),
        ("minicpm", "<|tool_call_start|>\n```python\na = 1\n```\n<|tool_call_end|>"),
        ("minicpm", "<|tool_call_start|>\n```python\n```\n<|tool_call_end|>"),
        ("olmo3", "<function_calls>add(1)</function_calls>"),
        ("olmo3", '<function_calls>add(text="'),
        ("solar_open", "<|tool_call:begin|>a1<|tool_call:name|>add<|tool_call:args|>{"),
        ("solar_open", "<|tool_call:begin|>add({})<|tool_call:end|>"),
    ],
)
def test_what_cannot_be_read_tells_the_model_how_a_call_is_written(name, turn):
    found = FORMATS[name].read(turn)
    assert found and isinstance(found[-1], Unreadable) and "tool call" in str(found[-1])


def test_a_template_that_writes_no_calls_proves_nothing_and_one_that_no_format_reads_is_refused():
    tokenizer = tokenizer_of("Qwen2.5")
    tokenizer.chat_template = chatml("")
    with pytest.raises(WrongFormat, match=r"does not write tool calls, and its prompt shows no known format"):
        choose_format(MessageTemplate(tokenizer), "auto")
    name, note = choose_format(MessageTemplate(tokenizer), "glm")
    assert name == "glm" and "does not write tool calls, so nothing proves" in note
    for example, shown in (('{"name": <name>}', "hermes"), ("name\n<arg_key>key</arg_key>", "glm")):
        tokenizer.chat_template = f"Write <tool_call>{example}</tool_call>." + chatml("")
        name, note = choose_format(MessageTemplate(tokenizer), "auto")
        assert name == shown and "does not write tool calls, so nothing proves" in note
    tokenizer.chat_template = chatml("{{ raise_exception('no calls') }}")
    with pytest.raises(WrongFormat, match=r"rejects messages with tool calls \(.*no calls\)"):
        choose_format(MessageTemplate(tokenizer), "auto")
    tokenizer.chat_template = chatml(JSON_CALL, results="{% elif m.role == 'tool' %}")
    with pytest.raises(WrongFormat, match=r"shows no tool results behind a call: (?s:.*)<tool_call>"):
        choose_format(MessageTemplate(tokenizer), "auto")
    tokenizer.chat_template = chatml("CALL {{ c.function.name }} WITH {{ c.function.arguments }}")
    with pytest.raises(WrongFormat, match=r"no format of tool calls reads .*(?s:.*)CALL probe_tool WITH"):
        choose_format(MessageTemplate(tokenizer), "auto")


def test_every_format_is_proved_by_a_template_and_has_its_row_in_the_docs():
    page = (Path(__file__).resolve().parents[2] / "docs" / "call_formats.md").read_text()
    real = {name for one in EXPECTED.values() for name in one.formats}
    assert {fitting for _, fitting in TEMPLATES.values()} | real == set(FORMATS) == set(NAMED)
    for name, form in FORMATS.items():
        assert f"| `{name}` | {form.models} |" in page
