"""A reward model's score beside a function's: weights, failures, what validation counts; runs with the model alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from reward_models import other_tokenizer, write_reward_model
from runs import metrics_of, run

from posttrain.config.root import PPOConfig
from posttrain.errors import UserError
from posttrain.protocol import DataProto
from posttrain.rewards.types import AllFailed
from posttrain.trainer.ppo.reward import ModelReward


class Scripted:
    """A worker group that gives these scores, or these errors."""

    def __init__(self, *scores: float | str) -> None:
        self.scores = scores

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        numbers = [0.0 if isinstance(score, str) else score for score in self.scores]
        errors = [score if isinstance(score, str) else None for score in self.scores]
        return DataProto.from_dict(
            tensors={"rm_scores": torch.tensor(numbers)[:, None]},
            non_tensors={"rm_error": errors, "rm_truncated": [False] * len(numbers)},
        )


def joined(model: Scripted, functions: list[Any], *, named: bool = True, validation: bool = False, **settings: Any):
    """(scores, parts, errors) after joining; a function's outcome is a score or an error."""
    config = PPOConfig()
    for key, value in settings.items():
        setattr(config.reward_model, key, value)
    rows = DataProto.from_dict(
        non_tensors={
            "reward_score": np.array([-7.0 if isinstance(f, str) else f for f in functions], dtype=object),
            "reward_parts": [{"pred": "x"} for _ in functions],
            "reward_error": [f if isinstance(f, str) else None for f in functions],
        }
    )
    ModelReward(config.reward_model, model, failure_score=-7.0, functions=True, named=named).join(
        rows, validation=validation
    )
    found = rows.non_tensor_batch
    return list(found["reward_score"]), list(found["reward_parts"]), list(found["reward_error"])


def test_a_named_function_counts_fully_and_an_unnamed_one_is_only_recorded():
    model = Scripted(2.0, -1.0)
    assert joined(model, [1.0, 0.0])[0] == [3.0, -1.0]
    scores, parts, errors = joined(model, [1.0, 0.0], named=False)
    assert scores == [2.0, -1.0] and errors == [None, None]
    assert parts[0] == {"pred": "x", "reward_model": 2.0, "function": 1.0, "acc": 1.0} and parts[1]["acc"] == 0.0


def test_weights_apply_to_both():
    assert joined(Scripted(2.0), [1.0], weight=0.5, function_weight=3.0)[0] == [4.0]
    assert joined(Scripted(2.0), [1.0], named=False, function_weight=3.0)[0] == [5.0]
    assert joined(Scripted(2.0), [1.0], function_weight=0.0)[0] == [2.0]


def test_a_failure_of_either_gives_the_failure_score_and_is_named():
    scores, parts, errors = joined(Scripted("gave nan", 1.0, 1.0), [1.0, "raised", 1.0])
    assert scores == [-7.0, -7.0, 2.0]
    assert errors == ["reward_model: gave nan", "function: raised", None]
    assert "reward_model" not in parts[0] and "function" not in parts[1]


def test_a_function_that_does_not_count_cannot_fail_a_response():
    scores, _, errors = joined(Scripted(1.5), ["raised"], named=False)
    assert scores == [1.5] and errors == ["function: raised"]


def test_a_reward_model_that_scores_nothing_stops_the_run():
    with pytest.raises(AllFailed, match=r"(?s)reward model failed on all 2 .*gave nan.*reward_model.model.path"):
        joined(Scripted("gave nan", "gave nan"), [1.0, 1.0])


def test_validation_keeps_the_functions_score():
    scores, parts, _ = joined(Scripted(9.0), [1.0], validation=True)
    assert scores == [1.0] and parts[0]["reward_model"] == 9.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_reward_model(tmp_path_factory.mktemp("rm") / "alone", tokenizer=other_tokenizer())


def test_without_a_scorer_for_the_rows_the_model_scores_alone(tiny_model, sums, model_folder, tmp_path):
    rows = [{"prompt": f"Tell me about {n}.", "data_source": "nobody/knows"} for n in range(8)]
    from runs import settings

    import posttrain

    keys = settings(
        tiny_model, sums, tmp_path, reward_model__enable=True, reward_model__model__path=str(model_folder),
        algorithm__filter_groups__enable=True, trainer__save_freq=1,
    )  # fmt: skip
    keys.pop("data.train_files")
    result = posttrain.train(keys, data=rows, val_data=rows[:2])
    lines = metrics_of(result.path)
    assert result.status == "finished" and lines[0]["val/nobody/knows/mean@1"] != 0
    assert lines[0]["val/nobody/knows/mean@1"] == lines[0]["val/nobody/knows/reward_model/mean@1"]
    for line in lines[1:]:
        assert line["reward_mean"] == pytest.approx(line["reward_model/mean"]) and "reward/function/mean" not in line


def test_remax_scores_its_greedy_baseline_by_the_model_too(tiny_model, sums, model_folder, tmp_path):
    result = run(
        tiny_model, sums, tmp_path, reward=None, algorithm__adv_estimator="remax", trainer__total_training_steps=1,
        reward_model__enable=True, reward_model__model__path=str(model_folder),
    )  # fmt: skip
    line = metrics_of(result.path)[-1]
    assert line["remax/baseline_mean"] != 0 and math.isfinite(line["remax/baseline_mean"])
    groups: dict[str, list[float]] = {}
    for row in pq.read_table(result.path / "samples" / "step_1.parquet").to_pylist():
        groups.setdefault(row["uid"], []).append(row["score"] - row["advantages"][0])
    for below in groups.values():  # all responses to a prompt are measured against its one greedy response
        assert below == pytest.approx([below[0]] * 3, abs=1e-5)
    assert sum(below[0] for below in groups.values()) / 4 == pytest.approx(line["remax/baseline_mean"], abs=1e-5)


def test_a_template_that_refuses_the_data_stops_the_run_before_anything_is_generated(tiny_model, sums, tmp_path):
    tokenizer = other_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('users only') }}"
    folder = write_reward_model(tmp_path / "strict", tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"users only\n.*roles user"):
        run(tiny_model, sums, tmp_path, reward_model__enable=True, reward_model__model__path=str(folder))


def test_a_sum_that_no_training_can_hold_is_a_failure():
    scores, _, errors = joined(Scripted(1e18, 1.0), [0.0, 0.0], weight=1e6)
    assert scores == [-7.0, 1e6]
    assert "the weighted sum is 1e+24" in errors[0] and errors[1] is None
