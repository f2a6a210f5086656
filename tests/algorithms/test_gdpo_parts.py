"""gdpo: which parts of a reward it learns from, with which weights, and what a part that is missing counts as."""

from __future__ import annotations

import math
import statistics
from typing import Any, cast

import numpy as np
import pytest
import torch

from posttrain.algorithms import AlgorithmError
from posttrain.config.root import AlgorithmConfig, PPOConfig
from posttrain.protocol import DataProto
from posttrain.trainer.ppo.ray_trainer import compute_advantage
from posttrain.trainer.ppo.reward import ModelReward, reward_weights

EPSILON = 1e-6
UIDS = ["a", "a", "a", "b", "b", "b"]
RIGHT = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
SHORT = [0.2, 0.9, 0.4, 0.5, 0.1, 0.8]
PENALTY = [0.0, -0.5, -0.1, 0.0, 0.0, -0.3]


def by_hand(*terms: tuple[float, list[float]]) -> list[float]:
    """Each part normalised within its group, the weighted sum over the batch; one number per response."""
    sums = [0.0] * len(UIDS)
    for weight, values in terms:
        for row, uid in enumerate(UIDS):
            group = [value for value, other in zip(values, UIDS, strict=True) if other == uid]
            distance = values[row] - statistics.fmean(group)
            sums[row] += weight * distance / (statistics.stdev(group) + EPSILON)
    mean, deviation = statistics.fmean(sums), statistics.stdev(sums)
    return [(value - mean) / (deviation + EPSILON) for value in sums]


def learnt(
    scores: list[float],
    parts: list[dict[str, Any]],
    *,
    errors: list[str | None] | None = None,
    weights: dict[str, float] | None = None,
    failure_score: float = 0.0,
    **settings: Any,
) -> list[float]:
    """The advantages of a batch as the trainer computes them; the rewards hold the overlong penalty, as in a run."""
    totals = [score + (part.get("overlong_reward") or 0.0) for score, part in zip(scores, parts, strict=True)]
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor(totals, dtype=torch.float64)[:, None],
            "response_mask": torch.ones(len(UIDS), 1),
        },
        non_tensors={
            "uid": np.array(UIDS, dtype=object),
            "reward_score": np.array(scores, dtype=object),
            "reward_parts": np.array(parts, dtype=object),
            "reward_error": np.array(errors or [None] * len(UIDS), dtype=object),
        },
    )
    config = AlgorithmConfig(adv_estimator="gdpo", **settings)
    compute_advantage(data, "gdpo", config=config, reward_weights=weights, failure_score=failure_score)
    return data.batch["advantages"][:, 0].tolist()


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    return [{name: column[row] for name, column in columns.items()} for row in range(len(UIDS))]


def weights_of(model_reward: ModelReward | None = None, *, named: bool = True, **reward: Any) -> dict[str, float]:
    config = PPOConfig()
    config.reward.functions = reward.get("functions", {})
    config.reward.overlong_buffer.enable = "penalty_factor" in reward
    config.reward.overlong_buffer.penalty_factor = reward.get("penalty_factor", 1.0)
    return reward_weights(config.reward, model_reward, named=named)


def model_beside(function_weight: float | None, *, weight: float = 1.0, named: bool = True) -> ModelReward:
    settings, scorer = PPOConfig().reward_model, cast("Any", None)
    settings.weight, settings.function_weight = weight, function_weight
    return ModelReward(settings, scorer, failure_score=0.0, functions=True, named=named)


def test_a_scalar_reward_with_an_overlong_penalty_is_learnt_from_beside_the_penalty():
    expected = pytest.approx(by_hand((1.0, RIGHT), (1.0, PENALTY)))
    assert learnt(RIGHT, rows(overlong_reward=PENALTY)) == expected
    assert learnt(RIGHT, rows(overlong_reward=PENALTY), weights=weights_of(penalty_factor=1.0)) == expected


def test_the_penalty_factor_weighs_the_penalty():
    tripled = [3 * penalty for penalty in PENALTY]
    found = learnt(RIGHT, rows(overlong_reward=tripled), weights=weights_of(penalty_factor=3.0))
    assert found == pytest.approx(by_hand((1.0, RIGHT), (3.0, PENALTY)))
    named = {"weights": weights_of(penalty_factor=3.0), "gdpo_reward_keys": ["score"]}
    assert learnt(RIGHT, rows(overlong_reward=tripled), **named) == pytest.approx(found)


def test_functions_count_by_their_weights_and_signs_and_nothing_else_does():
    functions = {
        "right": {"weight": 2.0},
        "short": {"max_tokens": 9, "weight": -0.5},
        "seen": {"weight": 0, "tags": ["a"]},
    }
    seen = [0.3, 0.1, 0.2, 0.9, 0.8, 0.7]
    parts = rows(right=RIGHT, short=SHORT, seen=seen, acc=SHORT, right_tests_passed=SHORT)
    totals = [2 * right - short / 2 for right, short in zip(RIGHT, SHORT, strict=True)]
    weights = weights_of(functions=functions)
    assert learnt(totals, parts, weights=weights) == pytest.approx(by_hand((2.0, RIGHT), (-0.5, SHORT)))
    chosen = learnt(totals, parts, weights=weights, gdpo_reward_keys=["short"])
    assert chosen == pytest.approx(by_hand((-0.5, SHORT)))
    heavier = learnt(totals, parts, weights=weights, gdpo_reward_weights=[1.0, 4.0])
    assert heavier == pytest.approx(by_hand((1.0, RIGHT), (4.0, SHORT)))


def test_what_a_function_tells_of_the_answer_is_no_reward():
    preds = [7.0, 3.0, 9.0, 1.0, 2.0, 8.0]
    found = learnt(SHORT, rows(acc=RIGHT, pred=preds, answer=preds))
    assert found == pytest.approx(by_hand((1.0, SHORT)))
    found = learnt(SHORT, rows(form=RIGHT, acc=PENALTY, pred=preds))
    assert found == pytest.approx(by_hand((1.0, RIGHT)))


def test_findings_of_a_built_in_scorer_are_no_rewards():
    found = learnt(RIGHT, rows(acc=RIGHT, tests_passed=SHORT), weights=weights_of(named=False))
    assert found == pytest.approx(by_hand((1.0, RIGHT)))


def test_a_reward_model_counts_beside_the_function_as_the_run_says():
    parts = rows(reward_model=SHORT, function=RIGHT, acc=RIGHT)
    unnamed = weights_of(model_beside(None, named=False))
    assert learnt(SHORT, parts, weights=unnamed) == pytest.approx(by_hand((1.0, SHORT)))
    both = weights_of(model_beside(2.0, weight=0.5))
    assert learnt(SHORT, parts, weights=both) == pytest.approx(by_hand((0.5, SHORT), (2.0, RIGHT)))
    combined = weights_of(model_beside(2.0), functions={"right": {"weight": -1.0}})
    assert combined == {"reward_model": 1.0, "right": -2.0}


@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, "nan", "", "a text"])
def test_one_part_that_is_no_number_counts_as_the_failure_score_there_and_spoils_nothing(wrong):
    parts = rows(right=list(RIGHT), short=list(SHORT))
    parts[1]["short"] = wrong
    taken = [-1.0 if row == 1 else value for row, value in enumerate(SHORT)]
    found = learnt(RIGHT, parts, failure_score=-1.0)
    assert found == pytest.approx(by_hand((1.0, RIGHT), (1.0, taken)))


def test_a_reward_that_failed_has_failed_in_every_part_unless_what_failed_does_not_count():
    parts = rows(right=list(RIGHT), short=list(SHORT))
    del parts[0]["short"]  # as a combined reward leaves it, one of whose functions raised
    errors = ["short: ValueError", *[None] * 5]
    failed = [[-1.0, *column[1:]] for column in (RIGHT, SHORT)]
    weights = {"right": 1.0, "short": 1.0}
    found = learnt([-1.0, *RIGHT[1:]], parts, errors=errors, weights=weights, failure_score=-1.0)
    assert found == pytest.approx(by_hand((1.0, failed[0]), (1.0, failed[1])))
    recorded = learnt(RIGHT, parts, errors=errors, weights={"right": 1.0, "short": 0.0}, failure_score=-1.0)
    assert recorded == pytest.approx(by_hand((1.0, RIGHT)))


def test_a_batch_of_failures_has_no_advantages_and_a_part_of_no_response_is_named():
    failed = ["ValueError: no"] * 6
    assert learnt([0.0] * 6, [{}] * 6, errors=failed, gdpo_reward_keys=["right"]) == [0.0] * 6
    with pytest.raises(AlgorithmError, match="no part 'right'"):
        learnt([0.0] * 6, [{}] * 6, gdpo_reward_keys=["right"])
