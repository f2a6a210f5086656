"""Half a character ("\\ud800", which no UTF-8 can hold) from a reward, a program or the data ends no run."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from posttrain.commands.evaluation.report import write_report
from posttrain.data.rows import table_of_rows
from posttrain.protocol import DataProto
from posttrain.rewards import RewardItem, RewardPool, RewardSpec
from posttrain.sandbox import Sandbox
from posttrain.texts import utf8, well_formed
from posttrain.tracking.loggers import JsonlLogger, read_metrics
from posttrain.tracking.samples import sample_table
from tests.machine import warm

HALF = "half \ud800 of one"
MENDED = "half \ufffd of one"


def half_reward(data_source, solution_str, ground_truth, extra_info=None):
    """Says it in its parts, in their names, in its errors, and aloud."""
    print(HALF)
    if int(ground_truth.split()[0]) % 2:
        raise ValueError(HALF)
    return {"score": float(len(solution_str) % 2), "failure": HALF, HALF: 1.0, "pred": HALF}


@pytest.fixture
def data(place):
    row = {"data_source": f"sums {HALF}", "prompt": [{"role": "user", "content": HALF}], "extra_info": {HALF: HALF}}
    rows = [{**row, "reward_model": {"ground_truth": f"{i} {HALF}"}} for i in range(8)]
    return place.write("half.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_with_half_characters_everywhere_goes_to_its_end_and_resumes(place, data):
    more = {"data__train_files": data, "data__val_files": data, "trainer__save_freq": 1, "trainer__test_freq": 1}
    for steps in (1, 2):
        result = place.run(reward=half_reward, **more, trainer__total_training_steps=steps)
        assert (result.status, result.steps) == ("finished", steps)
    samples = pq.read_table(result.path / "samples" / "step_2.parquet").to_pylist()
    assert all(row["ground_truth"].endswith(MENDED) and MENDED in row["prompt"] for row in samples)
    assert all(MENDED in (row["error"] or row["reward_parts"]) for row in samples)
    assert "8 of 8 train rows hold half a character" in place.capture.readouterr().out


def test_what_a_program_raises_can_be_written():
    program = "def f(x):\n    raise ValueError('half \\ud800 of one')"
    warm(Sandbox()).close()
    with RewardPool(RewardSpec(), num_workers=1) as pool:
        pool.submit(0, RewardItem("code", f"```python\n{program}\n```", ["assert f(1) == 1"]))
        result = pool.wait_all()[0]
    assert result.error is None and MENDED in str(result.parts["failure"])


def test_rows_are_mended_where_they_are_read_and_whole_characters_stay():
    table = table_of_rows([{"a\ud800": ["\ud83d\ude00", {"b": "\udc00"}], "n": 1}, {"c": "über \U0001f600"}])
    assert table.rows == [{"a\ufffd": ["\U0001f600", {"b": "\ufffd"}], "n": 1}, {"c": "über \U0001f600"}]
    assert table.repaired == 1 and "1 of 2 val rows" in table.notes("val")[0]
    assert table_of_rows([{"c": "x"}]).notes("val") == []


def test_writers_take_half_characters_from_whoever_comes_past_the_gates(tmp_path):
    assert well_formed(HALF) == MENDED and json.loads(utf8(json.dumps(HALF, ensure_ascii=False))) == HALF
    batch = {"responses": np.zeros((1, 2)), "response_mask": np.ones((1, 2)), "ground_truth": [HALF]}
    row = sample_table(1, {**batch, "reward_parts": [{HALF: 1}]}).to_pylist()[0]
    assert row["ground_truth"] == "half \\ud800 of one" and json.loads(row["reward_parts"]) == {HALF: 1}

    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.log(1, {HALF: 2.0})
    logger.close()
    assert list(read_metrics(tmp_path / "metrics.jsonl")) == [{"step": 1, HALF: 2.0}]
    assert json.loads(write_report(tmp_path, {"a": HALF}).read_text()) == {"a": HALF}

    rows = DataProto.from_dict(tensors={}, non_tensors={"text": np.array([HALF], dtype=object)})
    rows.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["text"][0] == HALF
