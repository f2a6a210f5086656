"""Data set classes and samplers written for verl make the rows of a run, and their order."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "trainer"))

from runs import metrics_of, run

from posttrain.config.trainer import DataConfig
from posttrain.data.own_dataset import read_own_rows
from posttrain.data.rows import DataError
from posttrain.errors import UserError
from posttrain.models.embedded import byte_tokenizer

CLASSES = """
import torch
from verl.experimental.dataset.sampler import AbstractSampler
from verl.utils.dataset.rl_dataset import RLHFDataset


class Mine(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [row for row in self.dataframe if int(row["ground_truth"]) % 2 == 0]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"] = [{"role": "user", "content": self.config.get("ask", "Q: ") + row["prompt"]}]
        row["reward_model"] = {"ground_truth": "even", "style": "rule"}
        row["extra_info"] = {"index": item, "place": torch.tensor(item).item()}
        row["input_ids"] = torch.zeros(3)
        return row


class Old(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        super().__init__(data_files, tokenizer, config, processor)


class Silent(RLHFDataset):
    def __getitem__(self, item):
        return {"input_ids": torch.zeros(3)}


class Failing(RLHFDataset):
    def __getitem__(self, item):
        raise KeyError("question")


class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.count, self.step = len(data_source), data_config.get("train_batch_size")

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(reversed(range(self.count)))


class Random(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.count = len(data_source)

    def __iter__(self):
        return iter(torch.randperm(self.count).tolist())


class Learning(Random):
    def update(self, batch):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CLASSES)
    yield tmp_path
    sys.modules.pop("mine", None)


OWN = {"data__custom_cls__path": "mine.py", "data__custom_cls__name": "Mine"}


def order_of(result, steps=2) -> list[list[int]]:
    tables = [pq.read_table(Path(result.path) / "samples" / f"step_{step}.parquet") for step in range(1, steps + 1)]
    return [list(dict.fromkeys(table["data_row"].to_pylist())) for table in tables]


def test_rows_of_an_own_data_set_are_what_its_items_say(tiny_model, sums, folder):
    seen = []

    def reward(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(len(solution_str)), "place": extra_info["place"]}

    result = run(tiny_model, sums, folder / "out", reward=reward, data__custom_cls__config__ask="A?", **OWN)
    rows = pq.read_table(Path(result.path) / "samples" / "step_1.parquet").to_pylist()
    for row in rows:
        seen.append((row["data_row"], json.loads(row["reward_parts"])["place"]))
        assert row["ground_truth"] == "even" and "A?" in row["prompt"]
    assert all(number == place for number, place in seen)


@pytest.mark.slow
def test_a_resumed_run_with_an_own_data_set_and_sampler_is_bitwise_the_same(tiny_model, sums, folder):
    own = {**OWN, "data__sampler__class_path": "mine.py", "data__sampler__class_name": "Random"}
    whole = run(tiny_model, sums, folder / "whole", **own, trainer__total_training_steps=4)
    half = {**own, "trainer__save_freq": 2}
    run(tiny_model, sums, folder / "half", **half, trainer__total_training_steps=2)
    resumed = run(tiny_model, sums, folder / "half", **half, trainer__total_training_steps=4)
    assert order_of(whole, 4) == order_of(resumed, 4)
    first, second = (metrics_of(Path(result.path))[-1] for result in (whole, resumed))
    same = [name for name in first if name.startswith(("reward", "actor", "kl", "entropy", "advantage", "grad"))]
    assert len(same) > 3 and [first[name] for name in same] == [second[name] for name in same]


def test_a_sampler_class_orders_the_rows(tiny_model, sums, folder):
    count = len(json.loads(Path(sums["train"]).read_text())) if str(sums["train"]).endswith(".json") else None
    result = run(tiny_model, sums, folder / "out", data__sampler="mine.py:Backwards", data__shuffle=True)
    first, second = order_of(result)
    assert first == sorted(first, reverse=True) and max(second) < min(first)
    assert count is None or max(first) == count - 1


def settings_with(folder, name, **more) -> DataConfig:
    rows = [{"prompt": f"{n}+{n}=", "ground_truth": str(2 * n)} for n in range(6)]
    (folder / "rows.json").write_text(json.dumps(rows))
    own = {"path": "mine.py", "name": name}
    return DataConfig(train_files="rows.json", custom_cls=own, **more)


def test_a_limit_on_rows_holds_for_classes_that_do_not_take_it(folder):
    tokenizer = byte_tokenizer()
    for name in ("Old", "Mine"):
        assert len(read_own_rows(settings_with(folder, name, train_max_samples=2), "train", tokenizer)) == 2
    row = read_own_rows(settings_with(folder, "Mine"), "train", tokenizer).rows[1]
    assert row["prompt"] == [{"role": "user", "content": "Q: 1+1="}] and row["extra_info"] == {"index": 1, "place": 1}
    assert "input_ids" not in row and "dummy_tensor" not in row and "raw_prompt" not in row


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Silent", "Row 1 of Silent of mine.py has neither raw_prompt nor prompt"),
        ("Failing", "Failing of mine.py failed: KeyError: 'question'"),
        ("Mien", "mine.py has no Mien. Did you mean Mine?"),
    ],
)
def test_a_class_that_gives_no_rows_is_refused(folder, name, words):
    with pytest.raises(UserError) as error:
        read_own_rows(settings_with(folder, name), "train", byte_tokenizer())
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data__custom_cls__path": "mine.py"}, "`data.custom_cls` has no `name`"),
        ({"data__custom_cls__path": "none.py", "data__custom_cls__name": "Mine"}, "the file none.py does not exist"),
        ({"data__custom_cls__pth": "mine.py"}, "`data.custom_cls.pth` is not known"),
        ({"data__sampler__class_path": "mine.py"}, "a sampler has a file and a class"),
        ({"data__sampler": "mine.py:Learning"}, "its `update` would change the order by what was trained"),
        ({"data__sampler": "mine.py:Randm"}, "data.sampler: mine.py has no Randm. Did you mean Random?"),
    ],
)
def test_what_is_wrong_with_a_class_or_sampler_is_said(tiny_model, sums, folder, more, words):
    with pytest.raises(UserError) as error:
        run(tiny_model, sums, folder / "out", **more)
    assert words in str(error.value)


def test_keys_that_a_command_adds_reach_the_class(folder):
    from verl._added import take_added

    args = ["data.custom_cls.path=mine.py", "+data.ask=Why? ", "+data.deep.er=3", "data.shuffle=False"]
    assert take_added(args)[1:3] == ["data.custom_cls.config.ask=Why? ", "data.custom_cls.config.deep.er=3"]
    assert take_added(["+data.ask=Why? "]) == ["+data.ask=Why? "], "nothing would read it"


def test_random_numbers_of_a_sampler_are_its_own(folder):
    import torch

    from posttrain.data.sampler import own_order

    order = own_order("mine.py:Random")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    made = [order(range(50), DataConfig(), 0, epoch) for epoch in (0, 1, 0)]  # pyright: ignore
    assert made[0] == made[2] != made[1] and torch.equal(torch.rand(2), expected)
    assert sorted(made[0]) == list(range(50)) and isinstance(np.random.rand(), float)


def test_rows_that_were_given_in_python_are_not_read_again_by_a_class(folder):
    from posttrain.data.own_dataset import open_own_rows

    with pytest.raises(DataError, match=r"data\.custom_cls has no effect, because the rows were given in Python"):
        open_own_rows(settings_with(folder, "Mine"), None, [{"prompt": "?"}], None)
