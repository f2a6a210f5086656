"""Rows for SFT: which columns are read, what is trained, what is cut, and what is refused."""

from __future__ import annotations

import json

import pytest
from chat_templates import CHATML, tokenizer_with, trained_texts

from posttrain.config.supervised import MultiturnConfig, SFTDataConfig
from posttrain.data.rows import DataError
from posttrain.data.supervised import SFTDataset

ROW = {"prompt": "2 + 2?", "response": "4"}
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def dataset(rows, tokenizer=None, **config):
    return SFTDataset(rows, tokenizer or tokenizer_with(CHATML), SFTDataConfig(**config))


def text(rows, **config):
    tokenizer = tokenizer_with(CHATML)
    made = dataset(rows, tokenizer, **config)
    return [trained_texts(tokenizer, row) for row in made]


def test_prompt_and_response_from_every_file_format(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "2 + 2?", "response": "4", "reward": 1.0}, {"prompt": "1 + 2?", "response": "3", "reward": 1.0}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("train.parquet", "train.json", "train.jsonl"):
        assert text(str(tmp_path / name)) == [["4<|im_end|>"], ["3<|im_end|>"]]


def test_columns_are_chosen_by_keys_also_inside_mappings():
    row = {"extra_info": {"question": "2 + 2?", "answer": {"short": 4}}}
    keys = {
        "prompt_key": "extra_info",
        "prompt_dict_keys": ["question"],
        "response_key": "extra_info",
        "response_dict_keys": ["answer", "short"],
    }
    assert text([row], **keys) == [["4<|im_end|>"]]
    assert text([{"q": "2 + 2?", "a": "4"}], prompt_key="q", response_key="a") == [["4<|im_end|>"]]
    with pytest.raises(DataError, match=r"has no 'long' \(data\.response_dict_keys\); it has: short"):
        dataset([row], **{**keys, "response_dict_keys": ["answer", "long"]})


def test_conversations_are_recognised_by_their_column_or_asked_for():
    assert text([TALK]) == [["yes<|im_end|>"]]
    renamed = {"chat": TALK["messages"], "response": "unused"}
    asked = MultiturnConfig(enable=True, messages_key="chat")
    assert text([renamed], multiturn=asked) == [["yes<|im_end|>"]]
    with pytest.raises(DataError, match=r"row 1 .*missing: column 'prompt'.* set .*enable=true .*key=messages"):
        dataset([TALK], multiturn=MultiturnConfig(enable=False))
    with pytest.raises(DataError, match=r"column 'chat' \(data.multiturn.messages_key\).* set \S*key=messages"):
        dataset([TALK], multiturn=asked)


def test_tools_and_system_prompt_reach_the_template():
    template = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + CHATML
    tokenizer = tokenizer_with(template)
    row = {**TALK, "tools": json.dumps([{"name": "search"}])}
    [made] = dataset([row], tokenizer)
    assert tokenizer.decode(made.ids).startswith("search<|im_start|>user")
    named = MultiturnConfig(tools_key="functions")
    [made] = dataset([{**TALK, "functions": [{"name": "search"}]}], tokenizer, multiturn=named)
    assert tokenizer.decode(made.ids).startswith("search<|im_start|>user")
    [made] = dataset([ROW], tokenizer, system_prompt="Be brief.")
    assert "system\nBe brief." in tokenizer.decode(made.ids)
    with pytest.raises(DataError, match=r"'tools' of row 1 .* not valid JSON"):
        dataset([{**TALK, "tools": "{"}], tokenizer)


def test_without_a_chat_template_the_response_follows_the_prompt_and_the_end_token_is_trained():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.chat_template = None
    made = dataset([ROW], tokenizer)
    assert tokenizer.decode(made[0].ids) == "2 + 2?4<|end|>"
    assert trained_texts(tokenizer, made[0]) == ["4<|end|>"]
    assert any("no chat template" in note for note in made.notes)
    with pytest.raises(DataError, match=r"chat messages.*no chat template.*model\.tokenizer_path"):
        dataset([TALK], tokenizer)


def test_rows_that_are_too_long_are_refused_dropped_or_cut_and_counted():
    long = {"prompt": "x" * 50, "response": "y" * 30}
    with pytest.raises(DataError, match=r"Row 2 of .* has \d+ tokens, more than data\.max_length=60.*truncation=drop"):
        dataset([ROW, long], max_length=60)
    dropped = dataset([ROW, long], max_length=60, truncation="drop")
    assert len(dropped) == 1 and any("1 of 2 train rows exceed" in note and "dropped" in note for note in dropped.notes)
    tokenizer = tokenizer_with(CHATML)
    left = dataset([ROW, long], tokenizer, max_length=60, truncation="left")
    assert len(left[1].ids) == 60 and trained_texts(tokenizer, left[1]) == ["y" * 30 + "<|im_end|>"]
    right = dataset([ROW, long], tokenizer, max_length=85, truncation="right")
    assert len(right[1].ids) == 85 and set(trained_texts(tokenizer, right[1])[0]) == {"y"}
    nothing = dataset([ROW, long], max_length=60, truncation="right")
    assert len(nothing) == 1 and any("1 train rows were cut down to nothing" in note for note in nothing.notes)
    with pytest.raises(DataError, match=r"None of the 1 train rows has a token to learn within data\.max_length=10"):
        dataset([long], max_length=10, truncation="right")


WRONG = {
    "missing column": ([{"prompt": "a", "answer": "b"}], r"response of row 1 .* missing: column 'response'.*answer"),
    "null": ([{"prompt": "a", "response": None}], "response of row 1 .* is empty"),
    "empty": ([{"prompt": "a", "response": ""}], "response of row 1 .* is empty"),
    "a list": ([{"prompt": "a", "response": ["b"]}], r"is a list, not a text.*multiturn\.enable"),
    "no prompt": ([{"response": "b"}], "prompt of row 1 .* is missing"),
    "no assistant": ([{"messages": TALK["messages"][:1]}], "row 1 .* has no assistant turn"),
    "no role": ([{"messages": [{"content": "x"}]}], "Message 1 .* has no 'role'"),
    "text for messages": ([{"messages": "hello"}], "conversation of row 1 .* is a string"),
    "images": ([{**ROW, "images": ["x.png"]}], "trains text models"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_are_named(case):
    rows, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        dataset(rows)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"data\.train_files: there are no rows"):
        dataset(str(tmp_path / "empty.jsonl"))
