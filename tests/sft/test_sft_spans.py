"""Exact spans of the assistant's tokens under several chat templates; those that cannot be trained on are refused."""

from __future__ import annotations

import pytest
from chat_templates import (
    ALWAYS_DROPS_THOUGHTS,
    CHATML,
    CHATML_WITHOUT_PROMPT,
    DROPS_THOUGHTS,
    LLAMA3,
    MISTRAL,
    OPENS_THOUGHTS,
    PLAIN,
    merging_tokenizer,
    tokenizer_with,
    trained_texts,
)

from posttrain.data.chat import SpanFinder
from posttrain.data.rows import DataError

TALK = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "héllo 👋"},
    {"role": "assistant", "content": "ok 👍"},
]
ENDINGS = {
    "embedded": (None, "<|end|>", ""),
    "chatml": (CHATML, "<|im_end|>", ""),
    "llama3": (LLAMA3, "<|eot_id|>", ""),
    "mistral": (MISTRAL, "</s>", " "),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_turns_and_the_token_that_ends_them_are_trained_and_nothing_else(name):
    template, end, before = ENDINGS[name]
    tokenizer = tokenizer_with(template)
    finder = SpanFinder(tokenizer)
    [row] = finder.rows(TALK, "row 1")
    assert trained_texts(tokenizer, row) == [f"{before}It is 4.{end}", f"{before}ok 👍{end}"]
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert row.ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    prompt = tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert row.ids[: row.prompt_length] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert (finder.split, finder.reworded, finder.unclosed) == (0, 0, 0)


def test_the_newline_behind_the_end_of_a_turn_is_not_trained():
    tokenizer = tokenizer_with(CHATML)
    [row] = SpanFinder(tokenizer).rows(TALK[:2], "row 1")
    assert tokenizer.decode(row.ids[-2:]) == "<|im_end|>\n" and row.trained[-2:] == [True, False]


def test_turns_after_the_last_assistant_turn_are_left_off():
    tokenizer = tokenizer_with(CHATML)
    [row] = SpanFinder(tokenizer).rows(TALK[:3], "row 1")
    assert [row] == SpanFinder(tokenizer).rows(TALK[:2], "row 1")


def test_a_template_that_rewrites_earlier_turns_makes_one_row_per_turn_in_the_context_the_model_will_see():
    tokenizer = tokenizer_with(DROPS_THOUGHTS)
    finder = SpanFinder(tokenizer)
    talk = [
        TALK[0],
        {"role": "assistant", "content": "<think>\nsmall\n</think>\n\n4"},
        TALK[2],
        {"role": "assistant", "content": "<think>\nwave\n</think>\n\nhi"},
    ]
    first, second = finder.rows(talk, "row 1")
    assert finder.split == 1
    assert trained_texts(tokenizer, first) == ["<think>\nsmall\n</think>\n\n4<|im_end|>"]
    assert trained_texts(tokenizer, second) == ["<think>\nwave\n</think>\n\nhi<|im_end|>"]
    text = tokenizer.decode(second.ids, skip_special_tokens=False)
    assert "small" not in text and "assistant\n4<|im_end|>" in text
    prompt = tokenizer.apply_chat_template(talk[:3], tokenize=False, add_generation_prompt=True)
    assert second.ids[: second.prompt_length] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_trimmed_white_space_is_counted_and_what_the_template_writes_is_trained():
    tokenizer = tokenizer_with(LLAMA3)
    finder = SpanFinder(tokenizer)
    [row] = finder.rows([TALK[0], {"role": "assistant", "content": "  4 \n"}], "row 1")
    assert trained_texts(tokenizer, row) == ["4<|eot_id|>"] and finder.reworded == 1


def test_a_template_that_drops_words_of_the_trained_turn_is_refused():
    finder = SpanFinder(tokenizer_with(ALWAYS_DROPS_THOUGHTS))
    with pytest.raises(DataError, match=r"does not write message 2 .* as it is: it was given '<think>"):
        finder.rows([TALK[0], {"role": "assistant", "content": "<think>hm</think>4"}], "row 7 of x.json")


def test_a_template_without_a_generation_prompt_is_refused_at_once():
    with pytest.raises(DataError, match=r"no generation prompt: it writes '<\|im_start\|>assistant"):
        SpanFinder(tokenizer_with(CHATML_WITHOUT_PROMPT))


def test_a_generation_prompt_that_is_not_how_turns_begin_is_refused():
    finder = SpanFinder(tokenizer_with(OPENS_THOUGHTS))
    with pytest.raises(DataError, match=r"differently from what it asks the model to continue.*'<think>"):
        finder.rows(TALK, "row 1")


def test_what_the_template_refuses_is_named_by_row_and_message():
    finder = SpanFinder(tokenizer_with(MISTRAL))
    with pytest.raises(DataError, match=r"refused message 3 .* of row 5: roles must alternate"):
        finder.rows([*TALK[:2], TALK[1]], "row 5")
    with pytest.raises(DataError, match=r"row 5 has no assistant turn"):
        finder.rows(TALK[:1], "row 5")


def test_tokens_never_cross_the_edge_of_a_turn():
    """The generation prompt ends in a space, which this tokenizer would merge with the first word of the answer."""
    tokenizer = merging_tokenizer(PLAIN)
    talk = [{"role": "user", "content": "why so"}, {"role": "assistant", "content": "because we can"}]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    assert " because" in [tokenizer.decode([token]) for token in tokenizer(whole)["input_ids"]]  # it does merge
    finder = SpanFinder(tokenizer)
    [row] = finder.rows(talk, "row 1")
    prompt = tokenizer.apply_chat_template(talk[:1], tokenize=False, add_generation_prompt=True)
    assert row.ids[: row.prompt_length] == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode(row.ids) == whole
    assert trained_texts(tokenizer, row) == ["because we can\n"] and finder.unclosed == 1
