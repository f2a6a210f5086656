"""The embedded arithmetic data: rows, split, files."""

import re

import pytest

from posttrain.config.trainer import DataConfig
from posttrain.data import PromptDataset
from posttrain.data.recipes.arithmetic import arithmetic_rows, write_files


def operands(row):
    a, b = re.fullmatch(r"(\d+) \+ (\d+) = \?", row["prompt"]).groups()
    return int(a), int(b)


def test_rows_ask_sums_below_the_bound_and_hold_their_truth():
    data = arithmetic_rows(max_operand=20)
    assert len(data["train"]) + len(data["test"]) == 400
    for row in data["train"] + data["test"]:
        a, b = operands(row)
        assert max(a, b) < 20 and row["ground_truth"] == str(a + b) and row["data_source"] == "math_reasoning"


def test_no_held_out_sum_is_trained_on_in_either_order():
    data = arithmetic_rows(max_operand=30, val_fraction=0.2)
    seen, held_out = ({tuple(sorted(operands(row))) for row in data[side]} for side in ("train", "test"))
    assert not seen & held_out and len(held_out) == 93  # a fifth of 465 unordered pairs
    assert len(seen) == 372


def test_rows_depend_on_the_seed_alone():
    assert arithmetic_rows(max_operand=15, seed=3) == arithmetic_rows(max_operand=15, seed=3)
    assert arithmetic_rows(max_operand=15, seed=3)["test"] != arithmetic_rows(max_operand=15, seed=4)["test"]
    # Recorded once: the data must not change between versions, or results could not be compared.
    assert [operands(row) for row in arithmetic_rows()["train"][:3]] == [(15, 10), (55, 92), (56, 58)]


def test_sizes_take_a_part_and_too_large_ones_are_errors():
    data = arithmetic_rows(max_operand=10, train_size=5, val_size=2)
    assert len(data["train"]) == 5 and len(data["test"]) == 2
    with pytest.raises(ValueError, match=r"train_size is 500; .* 1 to "):
        arithmetic_rows(max_operand=10, train_size=500)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_written_files_load_as_a_data_set(tmp_path, tokenizer, suffix):
    data = arithmetic_rows(max_operand=10)
    paths = write_files(tmp_path / "data", data, suffix=suffix)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [f"test.{suffix}", f"train.{suffix}"]
    loaded = PromptDataset(paths["train"], tokenizer, DataConfig())
    assert [item["ground_truth"] for item in loaded] == [row["ground_truth"] for row in data["train"]]
    assert loaded.data_sources == ["math_reasoning"] and loaded.notes == []
