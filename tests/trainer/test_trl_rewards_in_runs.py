"""Whole runs with reward functions written for TRL: lists of them, weights, columns, responses without a score."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import scripted
from runs import metrics_of, settings

import posttrain
from posttrain.config.choices import ESTIMATORS
from posttrain.errors import UserError

pytestmark = pytest.mark.slow
SCRIPTED = {"actor_rollout_ref__rollout__name": "scripted", "trainer__total_training_steps": 1}


def length_reward(completions, **kwargs):
    """Does not apply to the answer 0."""
    return [None if text == "0" else float(len(text)) for text in completions]


def right_reward(prompts, completions, answer, trainer_state, log_metric, **kwargs):
    """Applies to nothing that begins with 0."""
    assert all(isinstance(prompt, str) for prompt in prompts)
    log_metric("steps_done", trainer_state.global_step)
    return [None if text.startswith("0") else float(text == a) for text, a in zip(completions, answer, strict=True)]


def in_messages(prompts, completions, answer, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    return [float(completion[0]["content"] == a) for completion, a in zip(completions, answer, strict=True)]


def train(tiny_model, out, rows, *, reward, reward_weights=None, **more):
    given = settings(tiny_model, {"train": Path()}, out, **SCRIPTED | more)
    given.pop("data.train_files")
    return posttrain.train(given, reward=reward, reward_weights=reward_weights, data=rows)


def texts(answer: str = "1") -> list[dict]:
    return [{"prompt": f"{n}?", "answer": answer} for n in range(4)]


def samples(result, step: int = 1) -> list[dict]:
    return pq.read_table(Path(result.path) / "samples" / f"step_{step}.parquet").to_pylist()


def test_two_functions_with_weights_and_a_response_that_none_of_them_applies_to(tiny_model, tmp_path, capsys):
    """Its advantage is 0, and the others of its group are compared without it, as in TRL."""
    scripted.use(lambda read, seed: ("1", "22", "0", "01")[seed % 4])
    more = {"trainer__total_training_steps": 2, "actor_rollout_ref__rollout__n": 6}
    result = train(
        tiny_model, tmp_path, texts(), reward=[length_reward, right_reward], reward_weights=[0.5, 2.0], **more
    )
    assert "0.5 x length_reward (length_reward passed from Python) + 2 x right_reward" in capsys.readouterr().out
    wanted = {"1": 0.5 * 1 + 2.0, "22": 0.5 * 2 + 0.0, "01": 0.5 * 2, "0": np.nan}
    groups: dict[str, list[dict]] = {}
    for row in samples(result):
        groups.setdefault(row["uid"], []).append(row)
    seen = set()
    for rows in groups.values():
        scores = np.array([wanted[row["response"]] for row in rows])
        kept = scores[~np.isnan(scores)]
        for row, score in zip(rows, scores, strict=True):
            seen.add(row["response"])
            if np.isnan(score):
                assert "no reward function applies" in row["error"] and not any(row["advantages"])
                continue
            assert row["score"] == pytest.approx(score) and row["error"] is None
            spread = kept.std(ddof=1) if len(kept) > 1 else 1.0
            centre = kept.mean() if len(kept) > 1 else 0.0
            assert row["advantages"][0] == pytest.approx((score - centre) / (spread + 1e-6), abs=1e-4)
    assert seen == set(wanted)
    lines = metrics_of(result.path)
    assert [line["reward/right_reward_steps_done/mean"] for line in lines] == [0.0, 1.0], "trainer_state.global_step"


def test_prompts_in_messages_give_completions_in_messages(tiny_model, tmp_path):
    scripted.use(lambda read, seed: str(seed % 2))
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": "1"} for n in range(4)]
    for row in samples(train(tiny_model, tmp_path, rows, reward=in_messages)):
        assert (row["score"], row["error"]) == (float(row["response"] == "1"), None)


def test_a_column_that_no_row_has_is_refused_before_a_model_is_loaded(tiny_model, tmp_path):
    def reward(completions, solution, **kwargs):
        return [0.0] * len(completions)

    engines = scripted.use(lambda read, seed: "1")
    rows = [{"prompt": "1?", "solutions": "1"}] * 4
    with pytest.raises(
        UserError, match=r"(?s)takes solution, and the rows have no such column; did you mean solutions"
    ):
        train(tiny_model, tmp_path, rows, reward=reward)
    assert engines == []


def test_weights_without_functions_are_refused(tiny_model, tmp_path):
    with pytest.raises(UserError, match="reward_weights are given without reward"):
        train(tiny_model, tmp_path, texts(), reward=None, reward_weights=[1.0])


@pytest.mark.parametrize("estimator", [one for one in ESTIMATORS if one not in ("gae", "optimal_token_baseline")])
def test_every_estimator_trains_around_responses_without_a_score(tiny_model, tmp_path, estimator):
    scripted.use(lambda read, seed: ("1", "22", "0", "333")[seed % 4])
    more = {"algorithm__adv_estimator": estimator, "actor_rollout_ref__rollout__n": 6}
    result = train(tiny_model, tmp_path, texts(), reward=[length_reward, right_reward], **more)
    rows = samples(result)
    assert any(row["response"] == "0" for row in rows)
    assert not any(any(row["advantages"]) for row in rows if row["response"] == "0")
    assert all(np.isfinite(row["advantages"]).all() for row in rows)
    assert any(any(row["advantages"]) for row in rows), json.dumps([row["advantages"] for row in rows])
