"""Validation rows out of the training rows: how many, which, and that no prompt stands on both sides."""

from __future__ import annotations

import random

import pytest

from posttrain.config import load_config
from posttrain.data.dataset import describe_held_out, hold_out
from posttrain.data.rows import RowTable, table_of_rows


def table(prompts) -> RowTable:
    return table_of_rows([{"prompt": prompt, "ground_truth": "1"} for prompt in prompts])


def prompts(part: RowTable | None) -> list:
    return [row["prompt"] for row in part.rows] if part else []


@pytest.mark.parametrize("rows, wanted", [(1, 0), (19, 0), (20, 2), (72, 7), (1000, 100), (5000, 256)])
def test_a_tenth_is_held_out_at_most_256_and_none_of_few(rows, wanted):
    train, val = hold_out(table(f"prompt {n}" for n in range(rows)), "prompt")
    assert (len(train), len(val or ())) == (rows - wanted, wanted)
    assert not set(prompts(train)) & set(prompts(val))
    assert sorted(prompts(train) + prompts(val)) == sorted(f"prompt {n}" for n in range(rows))
    said = describe_held_out(len(train), len(val or ()))
    assert f"{wanted} of the {rows} training rows are held out" in said if wanted else "makes no validation" in said


def test_the_choice_depends_on_the_prompts_alone_and_rows_keep_their_order_and_place():
    texts = [f"prompt {n}" for n in range(100)]
    first = hold_out(table(texts), "prompt")
    assert prompts(hold_out(table(texts), "prompt")[1]) == prompts(first[1])
    mixed = random.Random(1).sample(texts, len(texts))
    assert set(prompts(hold_out(table(mixed), "prompt")[1])) == set(prompts(first[1]))
    for part in first:
        assert part is not None
        places = [part.position(row) for row in range(len(part))]
        assert places == sorted(places) and [texts[place] for place in places] == prompts(part)
        assert part.where(0) == f"row {places[0] + 1} of the given rows"


def test_rows_with_the_same_prompt_stay_on_one_side():
    chats = [[{"role": "user", "content": f"chat {n % 30}"}] for n in range(90)]
    train, val = hold_out(table(chats), "prompt")
    assert 0 < len(val or ()) <= 9 and len(val or ()) % 3 == 0
    assert not {str(prompt) for prompt in prompts(train)} & {str(prompt) for prompt in prompts(val)}
    assert hold_out(table(["the same"] * 50), "prompt")[1] is None


def test_limits_of_the_settings_hold():
    texts = [f"prompt {n}" for n in range(100)]
    assert len(hold_out(table(texts), "prompt", most=3)[1] or ()) == 3
    assert len(hold_out(table(texts), "prompt", batch=96)[0]) == 96
    assert hold_out(table(texts), "prompt", batch=100)[1] is None


def val_files(*settings: str, **more):
    return load_config(list(settings), **more).value("data.val_files")


def test_only_the_embedded_preset_on_other_rows_without_validation_holds_rows_out():
    assert val_files("preset=embedded") == "embedded"
    assert val_files("preset=embedded", "data.train_files=mine.json") == "held_out"
    assert val_files("preset=embedded", "data.train_files=mine.json", "data.val_files=own.json") == "own.json"
    assert val_files("preset=embedded", "data.train_files=mine.json", "data.val_files=embedded") == "embedded"
    assert val_files("preset=embedded", "data.train_files=mine.json", "data.val_files=null") is None
    assert val_files("preset=embedded", provided=["data.train_files"]) == "held_out"
    assert val_files("data.train_files=mine.json", "actor_rollout_ref.model.path=m") is None
