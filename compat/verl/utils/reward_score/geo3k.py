"""Geometry3K: 0.9 for the right answer in a box, 0.1 for thinking before it."""

from __future__ import annotations

import re

from verl.utils.reward_score import math_reward

_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_reward(predict_str: str) -> float:
    return float(_FORM.fullmatch(predict_str) is not None)


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    if use_boxed:
        return math_reward.compute_score(predict_str, ground_truth)
    return float(math_reward.is_equiv(predict_str, ground_truth))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    right = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * right + format_score * format_reward(predict_str)
