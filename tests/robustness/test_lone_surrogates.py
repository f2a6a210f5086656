"""Half a character ("\\ud800", which no UTF-8 can hold) from a reward, a program or the data ends no run."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from posttrain.protocol import DataProto

HALF = "half \ud800 of one"


def half_reward(data_source, solution_str, ground_truth, extra_info=None):
    """Says it in its parts, and in its errors."""
    if len(solution_str) % 3 == 0:
        raise ValueError(HALF)
    return {"score": float(len(solution_str) % 2), "failure": HALF, HALF: 1.0, "pred": HALF}


def rows(count=8):
    return [
        {
            "data_source": f"sums {HALF}",
            "prompt": [{"role": "user", "content": f"{i} + 1 = {HALF}"}],
            "reward_model": {"ground_truth": f"{i + 1} {HALF}"},
            "extra_info": {"note": HALF, "index": i},
        }
        for i in range(count)
    ]


@pytest.fixture
def data(place):
    return place.write("half.jsonl", "".join(json.dumps(row) + "\n" for row in rows()))


def test_a_run_with_half_characters_everywhere_goes_to_its_end_and_resumes(place, data):
    more = {"data__train_files": data, "data__val_files": data, "trainer__save_freq": 1, "trainer__test_freq": 1}
    for steps in (1, 2):
        result = place.run(reward=half_reward, **more, trainer__total_training_steps=steps)
    samples = pq.read_table(next(result.path.glob("samples/step_2.parquet"))).to_pylist()
    assert all(row["ground_truth"].endswith("half \\ud800 of one") for row in samples)
    told = [row["error"] or json.loads(row["reward_parts"])["failure"] for row in samples]
    assert all("half" in text for text in told)
