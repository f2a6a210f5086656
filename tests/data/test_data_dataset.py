"""PromptDataset: roles of columns, chat templates, overlong prompts."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from posttrain.config.trainer import DataConfig
from posttrain.data import DataError, PromptDataset

SEED_003_BLOCK = """[
  {
    "prompt": "请解答：15 + 27 = ?",
    "ground_truth": "42",
    "data_source": "math_reasoning"
  }
]
"""


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_documents_json_block_loads_as_it_is(tmp_path, tokenizer):
    path = tmp_path / "train.json"
    path.write_text(SEED_003_BLOCK, encoding="utf-8")
    data = PromptDataset(str(path), tokenizer, DataConfig())
    item = data[0]
    assert len(data) == 1 and data.notes == []
    assert item["raw_prompt"] == [{"role": "user", "content": "请解答：15 + 27 = ?"}]
    assert item["prompt"] == "<|user|>请解答：15 + 27 = ?<|end|><|assistant|>"
    assert tokenizer.decode(item["prompt_ids"]) == item["prompt"]
    assert item["ground_truth"] == "42" and item["data_source"] == "math_reasoning" and item["extra_info"] is None


def test_one_path_and_a_list_of_paths_give_the_rows_of_the_files(tmp_path, tokenizer):
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": "p1"}, {"prompt": "p2"}])
    b = write_parquet(tmp_path / "b.parquet", [{"prompt": "p3"}])
    assert [i["raw_prompt"][0]["content"] for i in PromptDataset(a, tokenizer, DataConfig())] == ["p1", "p2"]
    both = PromptDataset([str(a), b], tokenizer, DataConfig())
    assert [i["raw_prompt"][0]["content"] for i in both] == ["p1", "p2", "p3"] and both.file_of == [0, 0, 1]


def test_rows_of_prompt_response_reward_take_the_response_as_truth(tmp_path, tokenizer):
    rows = [{"prompt": f"q{i}", "response": f"a #### {i}", "reward": 1.0} for i in range(3)]
    data = PromptDataset(write_parquet(tmp_path / "train.parquet", rows), tokenizer, DataConfig())
    assert data[2]["ground_truth"] == "a #### 2" and data[2]["response"] == "a #### 2"
    assert data[2]["data_source"] is None
    assert any(
        "3 of 3 train rows have no ground_truth: their `response` is the reference answer" in note
        for note in data.notes
    )


def test_the_reward_column_is_carried_and_said_not_to_be_the_score(tokenizer):
    data = PromptDataset([{"prompt": "q", "ground_truth": "1", "reward": 0.5}], tokenizer, DataConfig())
    assert data[0]["extra_info"] == {"reward": 0.5}
    assert [note for note in data.notes if "does not replace the score of a new response" in note]


def test_prompt_alone_is_enough_and_missing_truths_are_noted(tokenizer):
    data = PromptDataset([{"prompt": "q"}, {"prompt": "r"}], tokenizer, DataConfig())
    assert data[0]["ground_truth"] is None and data.rows_without_truth == 2
    assert any("2 of 2 train rows have neither ground_truth nor response" in note for note in data.notes)


@pytest.mark.parametrize(
    ("row", "what"),
    [({"question": "q"}, "missing"), ({"prompt": None}, "null"), ({"prompt": ""}, "empty"), ({"prompt": []}, "empty")],
)
def test_a_row_without_prompt_names_file_and_row(tmp_path, tokenizer, row, what):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in [{"prompt": "ok"}, row]))
    with pytest.raises(DataError, match=rf"The prompt of row 2 of .*train\.jsonl is {what}: column 'prompt'"):
        PromptDataset(path, tokenizer, DataConfig())


def test_a_prompt_under_a_customary_name_is_offered(tokenizer):
    with pytest.raises(DataError, match=r"If 'question' is the prompt: data\.prompt_key=question\."):
        PromptDataset([{"question": "1 + 1", "answer": "2"}], tokenizer, DataConfig())
    with pytest.raises(DataError) as caught:
        PromptDataset([{"prompt": None, "question": "1 + 1"}], tokenizer, DataConfig())
    assert "If 'question'" not in str(caught.value)  # the column is there: this row is what is wrong


def test_ground_truth_wins_over_reward_model_and_response(tokenizer):
    rows = [
        {"prompt": "a", "ground_truth": "1", "reward_model": {"ground_truth": "2"}, "response": "3"},
        {"prompt": "b", "reward_model": {"style": "rule", "ground_truth": "2"}, "response": "3"},
        {"prompt": "c", "ground_truth": float("nan"), "response": "3"},
        {"prompt": "d", "ground_truth": 0},
    ]
    data = PromptDataset(rows, tokenizer, DataConfig())
    assert [item["ground_truth"] for item in data] == ["1", "2", "3", 0]
    assert any(note.startswith("1 of 4 train rows have no ground_truth") for note in data.notes)


def test_a_missing_data_source_takes_the_configured_one(tokenizer):
    rows = [{"prompt": "a", "data_source": "gsm8k"}, {"prompt": "b"}]
    assert PromptDataset(rows, tokenizer, DataConfig()).data_sources == ["gsm8k", None]
    assert PromptDataset(rows, tokenizer, DataConfig(data_source="math")).data_sources == ["gsm8k", "math"]


def test_extra_info_holds_the_rows_own_and_its_other_columns(tokenizer):
    row = {
        "prompt": "q",
        "ground_truth": "1",
        "data_source": "math",
        "response": "r",
        "ability": "math",
        "level": np.int64(3),
        "unused": None,
        "extra_info": {"split": "train", "level": 7},
    }
    extra = PromptDataset([row], tokenizer, DataConfig())[0]["extra_info"]
    assert extra == {"response": "r", "ability": "math", "level": 7, "split": "train"}


def test_rows_made_for_verl_load_from_parquet(tmp_path, tokenizer):
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0, "split": "train"},
        }
    ]
    item = PromptDataset(write_parquet(tmp_path / "t.parquet", rows), tokenizer, DataConfig())[0]
    assert item["raw_prompt"] == rows[0]["prompt"] and type(item["raw_prompt"]) is list
    assert item["prompt"] == "<|system|>Be brief.<|end|><|user|>2+2?<|end|><|assistant|>"
    assert item["ground_truth"] == "4" and item["data_source"] == "openai/gsm8k"
    assert item["extra_info"] == {
        "ability": "math",
        "reward_model": rows[0]["reward_model"],
        "index": 0,
        "split": "train",
    }


def test_files_of_different_schemas_mix(tmp_path, tokenizer):
    a = write_parquet(tmp_path / "a.parquet", [{"prompt": "p", "ground_truth": "1"}])
    b = write_parquet(
        tmp_path / "b.parquet", [{"prompt": [{"role": "user", "content": "q", "name": None}], "level": 2}]
    )
    data = PromptDataset([a, b], tokenizer, DataConfig())
    assert [item["raw_prompt"][0] for item in data] == [{"role": "user", "content": c} for c in "pq"]
    assert data.column("level") == [None, 2]


def test_system_prompt_goes_before_plain_strings_only(tokenizer):
    rows = [{"prompt": "q"}, {"prompt": [{"role": "user", "content": "m"}]}]
    data = PromptDataset(rows, tokenizer, DataConfig(system_prompt="S"))
    assert [item["prompt"] for item in data] == [
        "<|system|>S<|end|><|user|>q<|end|><|assistant|>",
        "<|user|>m<|end|><|assistant|>",
    ]
    only_messages = PromptDataset(rows[1:], tokenizer, DataConfig(system_prompt="S"))
    assert any("data.system_prompt has no effect" in note for note in only_messages.notes)


def test_a_system_prompt_that_the_template_leaves_out_is_noted(tokenizer, monkeypatch):
    assert not PromptDataset([{"prompt": "q"}], tokenizer, DataConfig(system_prompt="Be brief.")).prompt_notes
    deaf = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", deaf)
    data = PromptDataset([{"prompt": "q"}], tokenizer, DataConfig(system_prompt="Be brief."))
    assert data.prompt_notes == ["data.system_prompt: the chat template leaves it out, and the model never sees it."]


def test_template_arguments_reach_the_template_and_unused_ones_are_noted(tokenizer):
    config = DataConfig(apply_chat_template_kwargs={"enable_thinking": True, "colour": "red"})
    data = PromptDataset([{"prompt": "q", "ground_truth": "1"}], tokenizer, config)
    assert data[0]["prompt"].endswith("<|assistant|><think>")
    assert data.notes == ["data.apply_chat_template_kwargs: the chat template does not use `colour`."]
    with pytest.raises(DataError, match="`tokenize` cannot be set"):
        PromptDataset([{"prompt": "q"}], tokenizer, DataConfig(apply_chat_template_kwargs={"tokenize": True}))


def test_without_chat_template_strings_stay_as_they_are_and_messages_are_errors(bare_tokenizer):
    data = PromptDataset([{"prompt": "1 + 1 =", "ground_truth": "2"}], bare_tokenizer, DataConfig())
    assert data[0]["prompt"] == "1 + 1 =" and len(data[0]["prompt_ids"]) == 7
    assert data.notes == ["The tokenizer has no chat template: prompts are used as they are."]
    with pytest.raises(
        DataError, match=r"row 1 of the given rows is a list of messages.*no chat template; use an instruct"
    ):
        PromptDataset([{"prompt": [{"role": "user", "content": "q"}]}], bare_tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"data\.system_prompt is set, but the tokenizer has no chat template"):
        PromptDataset([{"prompt": "q"}], bare_tokenizer, DataConfig(system_prompt="S"))


def test_special_tokens_are_added_to_bare_prompts_and_never_to_rendered_ones(bos_tokenizers):
    templated, bare = bos_tokenizers
    rows = [{"prompt": "q"}]
    first = bare.convert_tokens_to_ids("<|system|>")
    assert len(PromptDataset(rows, templated, DataConfig())[0]["prompt_ids"]) == 4  # user, q, end, assistant
    ids = PromptDataset(rows, bare, DataConfig())[0]["prompt_ids"]
    assert len(ids) == 2 and ids[0] == first


def test_what_the_template_refuses_names_the_row(tokenizer):
    rows = [{"prompt": "q"}, {"prompt": [{"role": "critic", "content": "bad"}]}]
    with pytest.raises(DataError, match=r"refused the prompt of row 2 of the given rows: no critics here"):
        PromptDataset(rows, tokenizer, DataConfig())


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, "is a int; it must be a string or a list of messages"),
        ([{"content": "q"}], "Message 1 of the prompt of row 1 .* has no 'role'"),
        ([{"role": "user"}], "has no 'content'"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "q"}]}], "part of type 'image'"),
    ],
)
def test_malformed_prompts_say_what_is_wrong(tokenizer, prompt, message):
    with pytest.raises(DataError, match=message):
        PromptDataset([{"prompt": prompt}], tokenizer, DataConfig())


def test_rows_with_images_fail_clearly_and_empty_image_columns_do_not(tokenizer):
    row = {"prompt": "<image>what?", "images": [{"bytes": b"\x89PNG"}]}
    with pytest.raises(DataError, match=r"Row 1 of the given rows has column 'images': posttrain trains text models"):
        PromptDataset([row], tokenizer, DataConfig())
    assert (
        len(PromptDataset([{"prompt": "q", "images": []}, {"prompt": "r", "images": None}], tokenizer, DataConfig()))
        == 2
    )


def test_text_parts_of_a_message_are_joined(tokenizer):
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    data = PromptDataset([{"prompt": [{"role": "user", "content": content}]}], tokenizer, DataConfig())
    assert data[0]["raw_prompt"] == [{"role": "user", "content": "ab"}]


# Rendered prompts have 3 marks around the text: "x" * 7 makes 10 tokens.
LENGTHS = [{"prompt": "x" * n, "ground_truth": "1"} for n in (3, 8, 7, 20)]


def test_overlong_prompts_are_dropped_and_counted(tokenizer):
    data = PromptDataset(LENGTHS, tokenizer, DataConfig(max_prompt_length=10))
    assert [len(item["prompt_ids"]) for item in data] == [6, 10] and [item["index"] for item in data] == [0, 2]
    assert data.notes == [
        "2 of 4 train prompts exceed data.max_prompt_length=10 tokens and were dropped; the longest has 23."
    ]


@pytest.mark.parametrize(
    ("side", "start", "end"),
    [
        ("on the left", "xxx", "<|assistant|>"),
        ("on the right", "<|user|>xxx", "xxx"),
        ("in the middle", "<|user|>xxx", "<|assistant|>"),
    ],
)
def test_overlong_prompts_are_cut_on_the_configured_side(tokenizer, side, start, end):
    config = DataConfig(max_prompt_length=10, filter_overlong_prompts=False, truncation=side.split()[-1])
    data = PromptDataset(LENGTHS, tokenizer, config)
    assert [len(item["prompt_ids"]) for item in data] == [6, 10, 10, 10]
    assert data[3]["prompt"].startswith(start) and data[3]["prompt"].endswith(end)
    assert tokenizer.decode(data[3]["prompt_ids"]) == data[3]["prompt"]
    assert any(
        f"2 of 4 train prompts exceed data.max_prompt_length=10 tokens and were cut {side}" in n for n in data.notes
    )


def test_overlong_prompts_are_refused_with_count_and_first_row(tokenizer):
    config = DataConfig(max_prompt_length=10, filter_overlong_prompts=False)
    with pytest.raises(
        DataError, match=r"2 of 4 train prompts .*the first is row 2 of the given rows; the longest has 23"
    ):
        PromptDataset(LENGTHS, tokenizer, config)
    with pytest.raises(DataError, match="so none is left"):
        PromptDataset(LENGTHS, tokenizer, DataConfig(max_prompt_length=2))
    with pytest.raises(DataError, match=r"data\.truncation is 'both'"):
        PromptDataset(LENGTHS, tokenizer, DataConfig(truncation="both"))


def test_max_samples_belongs_to_the_split(tokenizer):
    config = DataConfig(train_max_samples=2, val_max_samples=3)
    assert len(PromptDataset(LENGTHS, tokenizer, config)) == 2
    assert len(PromptDataset(LENGTHS, tokenizer, config, split="val")) == 3
    with pytest.raises(DataError, match=r"data\.train_max_samples is 0"):
        PromptDataset(LENGTHS, tokenizer, DataConfig(train_max_samples=0))


def test_data_that_is_neither_files_nor_rows_fails_clearly(tokenizer):
    with pytest.raises(DataError, match="no rows"):
        PromptDataset([], tokenizer, DataConfig())
    with pytest.raises(DataError, match=r"data\.val_files names no file"):
        PromptDataset(None, tokenizer, DataConfig(), split="val")
    with pytest.raises(DataError, match="give paths, or a list of dicts"):
        PromptDataset({"prompt": "q"}, tokenizer, DataConfig())


def test_many_rows_are_tokenized_in_pieces_and_stay_in_order(tokenizer):
    rows = [{"prompt": str(i), "ground_truth": str(i)} for i in range(2500)]
    data = PromptDataset(iter(rows), tokenizer, DataConfig())
    assert [item["raw_prompt"][0]["content"] for item in data] == [item["ground_truth"] for item in data]
    assert all(
        tokenizer.decode(data[i]["prompt_ids"]) == f"<|user|>{i}<|end|><|assistant|>" for i in (0, 999, 1000, 2499)
    )
