"""Front door: `posttrain.utils.reward_score.gsm8k_reward`, the built-in GSM8K score for both calling forms."""

from __future__ import annotations

from typing import Any, overload

from posttrain.rewards.scorers import gsm8k, score_by_source

__all__ = ["default_compute_score", "gsm8k_reward"]


@overload
def gsm8k_reward(response: str, ground_truth: str, /) -> float: ...
@overload
def gsm8k_reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, /) -> float: ...
@overload
def gsm8k_reward(*, ground_truth: str, response: str = ..., solution_str: str = ..., **other: Any) -> float: ...


def gsm8k_reward(*args: Any, **named: Any) -> float:
    """1.0 if the response's final number is the truth's, else 0.0; by (response, truth) or by the four arguments."""
    names = (
        ("response", "ground_truth")
        if len(args) <= 2
        else ("data_source", "solution_str", "ground_truth", "extra_info")
    )
    given = {**dict(zip(names, args, strict=False)), **named}
    response = given["solution_str"] if "solution_str" in given else given["response"]
    return float(gsm8k.score(response, given["ground_truth"])["score"])


def default_compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The built-in score by data source, as a number."""
    result = score_by_source(data_source, solution_str, ground_truth, extra_info)
    return float(result["score"] if isinstance(result, dict) else result)
