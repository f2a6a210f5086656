"""Conversations with calls of tools: calls are trained as the model is to write them, what tools say is not."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import CHATML, tokenizer_with, trained_texts

from posttrain.config.supervised import SFTDataConfig
from posttrain.conversations.formats.base import FORMATS
from posttrain.conversations.templates import MessageTemplate
from posttrain.conversations.tools.base import ToolCall
from posttrain.data.rows import DataError
from posttrain.data.supervised import SFTDataset

SEARCH = {"query": "Rome", "near": {"town": "Östia"}}


def talk(call: object) -> list[dict]:
    return [
        {"role": "user", "content": "2 * 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "It is 6."},
    ]


def call(name: str = "calculator", arguments: object = None) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments or {"expression": "2 * 3"}}}


def dataset(rows, tokenizer=None):
    return SFTDataset(rows, tokenizer or tokenizer_with(None), SFTDataConfig(max_length=512))


FORMS = {
    "mapping": call(),
    "json": call(arguments='{"expression": "2 * 3"}'),
    "bare": {"name": "calculator", "arguments": {"expression": "2 * 3"}},
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_trained_and_what_tools_say_is_read(form):
    tokenizer = tokenizer_with(None)
    [row] = dataset([{"messages": talk(FORMS[form])}], tokenizer)
    first, second = trained_texts(tokenizer, row)
    [made] = FORMATS["hermes"].read(first)
    assert made == ToolCall("calculator", {"expression": "2 * 3"})
    assert first.endswith("</tool_call><|end|>") and second == "It is 6.<|end|>"
    told = [one for one, own in zip(row.ids, row.trained, strict=True) if not own]
    heard = MessageTemplate(tokenizer).ids([{"role": "tool", "content": "6"}], tokenizer.eos_token_id)
    assert told[-len(heard) :] == heard, "a run with tools shows the same tokens between two turns"


def test_what_parquet_fills_into_calls_and_schemas_is_not_trained(tmp_path):
    schemas = [
        [{"type": "function", "function": {"name": name, "parameters": {"properties": {key: {"type": "string"}}}}}]
        for name, key in (("calculator", "expression"), ("search", "query"))
    ]
    rows = [{"messages": talk(call()), "tools": schemas[0]}]
    rows += [{"messages": talk(call("search", SEARCH)), "tools": schemas[1]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    filled, plain = (dataset(str(tmp_path / name)) for name in ("train.parquet", "train.jsonl"))
    assert [row.ids for row in filled] == [row.ids for row in plain]
    [made] = FORMATS["hermes"].read(trained_texts(tokenizer_with(None), filled[1])[0])
    assert made == ToolCall("search", SEARCH)


WRONG = {
    "no name": ({"function": {"arguments": {}}}, "tool call 1 of message 2 of row 1 .* has no name"),
    "a text": ("calculator(2)", "tool call 1 of message 2 of row 1 .* has no name"),
    "no json": (call(arguments="{2 * 3"), "arguments of the tool call 1 of message 2 .* not valid JSON"),
    "a list": (call(arguments=[1]), "are a list; they must be a mapping"),
}


@pytest.mark.parametrize("case", WRONG)
def test_calls_that_are_none_are_named(case):
    wrong, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        dataset([{"messages": talk(wrong)}])


def test_a_template_that_leaves_calls_out_is_refused_and_not_trained_on_empty_turns():
    with pytest.raises(DataError, match=r"leaves out the tool call of message 2 .*'calculator' does not stand in"):
        dataset([{"messages": talk(call())}], tokenizer_with(CHATML))
