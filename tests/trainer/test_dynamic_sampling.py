"""Dynamic sampling: groups without signal are replaced, surplus waits for the next step, resuming is exact."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from light_rewards import even_share, rarely_right
from runs import metrics_of, run, settings

import posttrain
from posttrain.config.rollout import OverlongBufferConfig
from posttrain.config.root import FilterGroupsConfig
from posttrain.data.rows import DataError
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.dynamic_sampling import FilterError, GroupFilter
from posttrain.trainer.ppo.reward import add_overlong_penalty

N = 2


def batch_of(draw: int, signal: list[bool], width: int = 3) -> DataProto:
    """One group of two per entry; with signal their scores differ."""
    rows = len(signal) * N
    scores = torch.zeros(rows, width)
    for group, differs in enumerate(signal):
        scores[group * N, -1] = 1.0 if differs else 0.0
    parts = [{"acc": float(score), "style": 0.5} for score in scores.sum(-1)]
    data = DataProto.from_dict(
        tensors={"responses": torch.full((rows, width), draw), "token_level_scores": scores},
        non_tensors={
            "uid": np.array([f"{draw}-{row // N}" for row in range(rows)], dtype=object),
            "reward_parts": np.array(parts, dtype=object),
            "reward_score": np.array(scores.sum(-1).tolist(), dtype=object),
        },
    )
    data.meta_info["step"] = draw
    return data


def uids(data: DataProto) -> list[str]:
    return list(dict.fromkeys(data.non_tensor_batch["uid"].tolist()))


def filled(filter_: GroupFilter, draws: list[list[bool]], prompts: int = 3):
    asked = []

    def sample(draw: int) -> DataProto:
        asked.append(draw)
        return batch_of(draw, draws[draw])

    batch, metrics = filter_.fill(sample, prompts)
    return batch, metrics, asked


def test_batches_are_drawn_until_groups_with_signal_fill_one():
    filter_ = GroupFilter(FilterGroupsConfig(enable=True))
    batch, metrics, asked = filled(
        filter_, [[True, False, False], [False, True, False], [True, True, False], [True] * 3]
    )
    assert uids(batch) == ["0-0", "1-1", "2-0"] and asked == [0, 1, 2]
    assert len(batch) == 3 * N
    assert metrics == {
        "filter_groups/gen_batches": 3.0,
        "filter_groups/kept": 4 / 9,
        "filter_groups/missing": 0.0,
        "filter_groups/surplus": 1.0,
    }
    assert filter_.surplus is not None and uids(filter_.surplus) == ["2-1"]


def test_the_surplus_comes_first_in_the_next_step_and_may_spare_a_batch():
    filter_ = GroupFilter(FilterGroupsConfig(enable=True))
    filled(filter_, [[True] * 5], prompts=2)
    batch, metrics, asked = filled(filter_, [[True] * 5], prompts=3)
    assert uids(batch) == ["0-2", "0-3", "0-4"] and asked == [] and metrics["filter_groups/gen_batches"] == 0.0
    assert filter_.surplus is None


def test_a_surplus_saved_before_samples_had_seeds_is_joined_with_rows_that_have_them():
    old, new = batch_of(0, [True]), batch_of(1, [True])
    new.non_tensor_batch["seed"] = np.array([7] * len(new), dtype=object)
    filter_ = GroupFilter(FilterGroupsConfig(enable=True, metric="score"))
    filter_.surplus = old
    batch, _ = filter_.fill(lambda _: new, 2)
    assert list(batch.non_tensor_batch["seed"]) == [None] * len(old) + [7] * len(new)


def test_what_the_limit_leaves_open_is_filled_with_groups_without_signal():
    filter_ = GroupFilter(FilterGroupsConfig(enable=True, max_num_gen_batches=2))
    batch, metrics, asked = filled(filter_, [[False, False, True], [False, False, False]])
    assert uids(batch) == ["0-2", "0-0", "0-1"] and asked == [0, 1]
    assert metrics["filter_groups/missing"] == 2.0


@pytest.mark.parametrize("metric", ["score", "seq_reward", "acc"])
def test_the_metric_decides_what_must_differ(metric):
    filter_ = GroupFilter(FilterGroupsConfig(enable=True, metric=metric))
    assert uids(filled(filter_, [[False, True, False], [True, True, True]])[0]) == ["0-1", "1-0", "1-1"]


def test_a_part_of_the_reward_can_be_the_metric_and_an_unknown_one_is_named():
    filter_ = GroupFilter(FilterGroupsConfig(enable=True, metric="style", max_num_gen_batches=1))
    assert filled(filter_, [[True] * 3])[1]["filter_groups/kept"] == 0.0
    with pytest.raises(FilterError, match=r"metric=taste.*acc, style"):
        filled(GroupFilter(FilterGroupsConfig(enable=True, metric="taste")), [[True] * 3])


def test_the_surplus_is_saved_and_read_back(tmp_path):
    filter_ = GroupFilter(FilterGroupsConfig(enable=True))
    filled(filter_, [[True] * 5])
    filter_.save(tmp_path)
    other = GroupFilter(FilterGroupsConfig(enable=True))
    other.load(tmp_path)
    assert filter_.surplus is not None and other.surplus is not None
    assert uids(other.surplus) == uids(filter_.surplus)
    assert torch.equal(other.surplus.batch["token_level_scores"], filter_.surplus.batch["token_level_scores"])


FILTERED = {
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__max_num_gen_batches": 6,
    "trainer__total_training_steps": 4,
    "trainer__save_freq": 2,
    "reward__overlong_buffer__enable": True,
    "reward__overlong_buffer__len": 3,
}


def test_a_run_with_dynamic_sampling_resumes_with_its_surplus_to_the_bit(tiny_model, sums, tmp_path):
    straight = run(tiny_model, sums, tmp_path / "straight", reward=rarely_right, **FILTERED)
    halves = {**FILTERED, "trainer__total_training_steps": 2}
    run(tiny_model, sums, tmp_path / "halves", reward=rarely_right, **halves)
    surplus = tmp_path / "halves" / "test" / "run" / "checkpoints" / "global_step_2" / "surplus"
    resumed = run(tiny_model, sums, tmp_path / "halves", reward=rarely_right, **FILTERED)
    lines = metrics_of(straight.path)
    assert metrics_of(resumed.path) == lines
    assert any(line["filter_groups/gen_batches"] > 1 for line in lines)
    assert any(line["filter_groups/surplus"] > 0 for line in lines[:2]) and surplus.is_dir() == (
        lines[1]["filter_groups/surplus"] > 0
    )
    assert all(line["groups/no_signal"] == 0 for line in lines if line["filter_groups/missing"] == 0)
    assert all(line["groups/count"] == 4 for line in lines)
    assert all(line["reward/overlong_reward/mean"] < 0 for line in lines)
    assert weights_equal(straight.path, resumed.path)


def rows_with_values(sums: dict[str, Path], folder: Path) -> Path:
    """The sums as parquet, with values beside them that JSON has no name for."""
    rows = json.loads(sums["train"].read_text())
    for row in rows:
        row["extra_info"] = VALUES
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return folder / "train.parquet"


VALUES = {
    "when": datetime(2024, 2, 29, 12, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    "day": date(2024, 2, 29),
    "took": timedelta(seconds=1, microseconds=5),
    "blob": b"\x00\xff",
    "price": Decimal("1.10"),
    "parts": [{"price": Decimal("0.25"), "at": datetime(2024, 1, 1)}],
}


def test_a_run_whose_rows_hold_dates_bytes_and_decimals_is_saved_with_its_surplus(tiny_model, sums, tmp_path):
    data = {"train": rows_with_values(sums, tmp_path)}
    run(tiny_model, data, tmp_path / "run", reward=rarely_right, **{**FILTERED, "trainer__total_training_steps": 2})
    (folder,) = (tmp_path / "run").glob("test/run/checkpoints/global_step_2/surplus")
    values = DataProto.load_from_disk(folder).non_tensor_batch["extra_info"][0]
    assert {name: values[name] for name in VALUES} == VALUES and str(values["when"].tzinfo) == "Europe/Berlin"
    resumed = run(tiny_model, data, tmp_path / "run", reward=rarely_right, **FILTERED)
    assert metrics_of(resumed.path)[-1]["step"] == 4


def test_rows_that_no_checkpoint_can_hold_are_rejected_before_such_a_run_starts(tiny_model, sums, tmp_path):
    rows = json.loads(sums["train"].read_text())
    rows[2]["extra_info"] = {"judge": [Path]}
    config = settings(tiny_model, sums, tmp_path, **FILTERED)
    del config["data.train_files"]
    with pytest.raises(DataError, match=r"extra_info\['judge'\]\[0\] of row 3 of the train rows is a .*filter_groups"):
        posttrain.train(config, data=rows, reward=rarely_right)
    # Other runs keep no rows, and give any value to the reward.
    config |= {"algorithm.filter_groups.enable": False, "trainer.total_training_steps": 1}
    assert posttrain.train(config, data=rows, reward=rarely_right).path.is_dir()


def weights_equal(a: Path, b: Path) -> bool:
    from test_resume import tensors

    left, right = tensors(a), tensors(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_overlong_penalty_is_in_the_score_and_not_in_the_raw_reward(tiny_model, sums, tmp_path):
    off = metrics_of(run(tiny_model, sums, tmp_path / "off", reward=even_share, trainer__total_training_steps=1).path)[
        0
    ]
    more = {
        "reward__overlong_buffer__enable": True,
        "reward__overlong_buffer__len": 6,
        "trainer__total_training_steps": 1,
    }
    on = metrics_of(run(tiny_model, sums, tmp_path / "on", reward=even_share, **more).path)[0]
    assert on["reward_mean"] == pytest.approx(off["reward_mean"] + on["reward/overlong_reward/mean"], abs=1e-6)
    assert on["reward/overlong_reward/mean"] == pytest.approx(-on["response_length"] / 6)


def test_buffer_and_factor_of_the_overlong_penalty_are_those_that_are_set():
    lengths, limit = torch.tensor([3, 7, 10]), 10
    mask = (torch.arange(limit) < lengths[:, None]).long()
    data = DataProto.from_dict(
        tensors={"responses": mask, "attention_mask": torch.cat([torch.ones(3, 2, dtype=torch.long), mask], -1)},
        non_tensors={"reward_parts": [{}, {}, {}]},
    )
    scores = np.zeros(3, np.float32)
    add_overlong_penalty(scores, data, OverlongBufferConfig(enable=True, len=4, penalty_factor=0.5), limit)
    assert scores.tolist() == [0.0, -0.125, -0.5]
    assert [part["overlong_reward"] for part in data.non_tensor_batch["reward_parts"]] == [0.0, -0.125, -0.5]


@pytest.mark.parametrize("wrong", [None, float("nan"), "nan", "", "a text"])
def test_a_metric_that_is_no_number_on_one_response_counts_as_a_failure_there(wrong):
    def sample(draw: int) -> DataProto:
        data = batch_of(draw, [True, True])
        for row, part in enumerate(data.non_tensor_batch["reward_parts"]):
            part["style"] = wrong if row == 0 else 0.5
        return data

    filter_ = GroupFilter(FilterGroupsConfig(enable=True, metric="style", max_num_gen_batches=1), failure_score=0.5)
    assert filter_.fill(sample, 2)[1]["filter_groups/kept"] == 0.0
    filter_ = GroupFilter(FilterGroupsConfig(enable=True, metric="style", max_num_gen_batches=1))
    batch, metrics = filter_.fill(sample, 2)
    assert metrics["filter_groups/kept"] == 0.5 and len(batch) == 2 * N
