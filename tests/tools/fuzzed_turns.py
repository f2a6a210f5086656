"""Turns that no model should write: calls of a format, cut, doubled, nested and mixed with what other formats use."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from posttrain.conversations.formats.base import FORMATS, Unreadable
from posttrain.conversations.tools.base import ToolCall

MARKS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|start|>", "<|message|>", "<|channel|>", "<|call|>", " to=functions.f ", "<|tool_call_begin|>", "functions.f:0",
    "<|tool_call_argument_begin|>", "<minimax:tool_call>", '<invoke name="f">', '<parameter name="a">', "```json\n",
    "{", "}", "[", "]", '"', "'", ",", ":", "(", ")", "\\", "\n", "\0", "\ud800", "é", "½", "f(a=", "NaN", "1e999", "-",
    "9" * 5000, " ", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', "[f(a=1)]", "null",
    "lambda:", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="false">', "</｜DSML｜parameter>",
    '<|"|>', "<|tool_call>call:f{", "<tool_call|>", '<|open|>call tool="f"<|sep|>', "<|close|>call<|sep|>",
    "]<]minimax[>[<a>", '<|open|>argument key="a" type="number"<|sep|>', "]<]minimax[>[</a>", "]<]minimax[>[<item>",
    "<seed:tool_call>", '<atem:invoke name="f">', '<atem:parameter name="a">', "<tool_call:opensource>",
    "f<tool_sep:opensource>", "<arg_key:opensource>a</arg_key:opensource>", "<arg_value:opensource>", "<tool_calls>",
    "<TOOLCALL>", "<seed:think>", "<|tool_call|>", "a:", "<|tools_prefix|>[", "<start_function_call>call:f{",
    "<escape>", '[{"name": "f", "arguments": {}}', "<|START_ACTION|>[", '{"tool_name": "f"}', ">>>f\n",
    ">>>all\n", "all\n", "function call<|role_sep|>", "<|message_sep|>", "<function_call>", "<|action_start|>",
    "<|plugin|>", "<|action_end|>", "<longcat_tool_call>", "<|tool_call_start|>", "```python\n", "<|tool_call_end|>",
    "<function_calls>", "f(a=1)\n", "<|tool_call:begin|>", "<|tool_call:name|>f<|tool_call:args|>", "<|tool_call:end|>",
    "<|think|>", "<|end|>", "<|thought_start|>", '>{"a": "', '>["<"]', '"\"\"', "\ue000",
    "<|function_call|>", '<function name="f">', '<param name="a">', "</param>", "<![CDATA[", "]]>",
]  # fmt: skip
ARGUMENTS = [{}, {"a": 1}, {"text": "</tool_call>"}, {"a": [1, {"b": None}]}, {"x": "<think>"}, {"é": "\n"}]


def turns(name: str, count: int, seed: int = 0) -> Iterator[str]:
    """So many turns for a format, always the same ones."""
    draw, form = random.Random(f"{name} {seed}"), FORMATS[name]
    for number in range(count):
        whole = form.write(ToolCall("f", draw.choice(ARGUMENTS)))
        match number % 5:
            case 0:  # cut anywhere
                yield whole[: draw.randrange(len(whole) + 1)]
            case 1:  # a piece taken out, another put in
                start, end = sorted(draw.randrange(len(whole) + 1) for _ in range(2))
                yield whole[:start] + draw.choice(MARKS) + whole[end:]
            case 2:  # several, with anything between them
                yield "".join(draw.choice([whole, draw.choice(MARKS)]) for _ in range(draw.randrange(1, 12)))
            case 3:  # marks alone
                yield "".join(draw.choices(MARKS, k=draw.randrange(30)))
            case _:  # one mark, very often
                mark = draw.choice(MARKS)
                yield draw.choice(["", whole, whole[: draw.randrange(len(whole) + 1)]]) + mark * min(
                    draw.choice([100, 10_000]), 100_000 // len(mark)
                )


def read_all(name: str, count: int, seed: int = 0) -> tuple[int, int, float]:
    """(calls that were read, texts that are none, the most CPU seconds of a turn). Anything raised comes out."""
    calls, broken, longest = 0, 0, 0.0
    for turn in turns(name, count, seed):
        start = time.process_time()
        found = FORMATS[name].read(turn)
        longest = max(longest, time.process_time() - start)
        for one in found:
            assert isinstance(one, Unreadable) or (isinstance(one.name, str) and isinstance(one.arguments, dict)), turn
            calls, broken = calls + isinstance(one, ToolCall), broken + isinstance(one, Unreadable)
    return calls, broken, longest
