"""`reward_func.py` beside train.sh, and the front door posttrain.utils.reward_score."""

import importlib.util
import inspect
import shutil
from pathlib import Path

import pytest

import posttrain
from posttrain.config.rollout import CustomRewardConfig
from posttrain.rewards import RewardItem, RewardPool, resolve_reward
from posttrain.utils.reward_score import gsm8k_reward

FILE = Path(posttrain.__file__).parents[1] / "reward_func.py"


@pytest.fixture(scope="module")
def reward_func():
    spec = importlib.util.spec_from_file_location("reward_func_under_test", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_compute_score_has_the_documented_signature_and_gives_floats(reward_func):
    assert list(inspect.signature(reward_func.compute_score).parameters) == [
        "data_source",
        "solution_str",
        "ground_truth",
        "extra_info",
    ]
    assert reward_func.compute_score("math_reasoning", "... 42", "42") == 1.0
    assert reward_func.compute_score("math_reasoning", "... 41", "42") == 0.0
    assert type(reward_func.compute_score("qa", "Paris", "paris")) is float


def test_extract_final_answer_is_importable_from_the_file(reward_func):
    assert [reward_func.extract_final_answer(t) for t in ("15 + 27 = 42", "\\boxed{42}", "#### 42")] == ["42"] * 3


def test_code_is_scored_by_the_default_file(reward_func, sandboxed):
    for source in ("code", "code_generation"):
        assert reward_func.compute_score(source, "```python\ndef f(x): return x + 1\n```", ["assert f(1) == 2"]) == 1.0
        assert reward_func.compute_score(source, "```python\ndef f(x): return x\n```", ["assert f(1) == 2"]) == 0.0


def test_the_file_is_what_runs_call_and_an_edit_changes_the_rewards(tmp_path):
    shutil.copy(FILE, tmp_path / "reward_func.py")
    scores = []
    for _ in range(2):
        spec = resolve_reward(CustomRewardConfig(path=str(tmp_path / "reward_func.py")))
        with RewardPool(spec, num_workers=1) as pool:
            pool.submit(0, RewardItem("gsm8k", "#### 42", "42"))
            scores.append(pool.wait_all()[0].score)
        with open(tmp_path / "reward_func.py", "a") as file:
            file.write("\n_first = compute_score\n")
            file.write("def compute_score(*args, **kwargs):\n    return 0.25 * _first(*args, **kwargs)\n")
    assert scores == [1.0, 0.25]


def test_gsm8k_reward_takes_both_calling_forms():
    assert gsm8k_reward("so #### 42", "42") == 1.0
    assert gsm8k_reward("so #### 41", "42") == 0.0
    assert gsm8k_reward("gsm8k", "so #### 42", "42") == gsm8k_reward("gsm8k", "so #### 42", "42", {"a": 1}) == 1.0
    assert gsm8k_reward(response="#### 42", ground_truth="#### 42") == 1.0
    assert gsm8k_reward(data_source="x", solution_str="#### 42", ground_truth="42", extra_info=None) == 1.0


def test_gsm8k_reward_is_found_by_its_dotted_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = resolve_reward(CustomRewardConfig(path="posttrain.utils.reward_score.gsm8k_reward"))
    with RewardPool(spec, num_workers=1) as pool:
        pool.submit("right", RewardItem("anything", "so #### 42", "42"))
        pool.submit("wrong", RewardItem("anything", "so #### 4", "42"))
        assert {key: result.score for key, result in pool.wait_all().items()} == {"right": 1.0, "wrong": 0.0}
