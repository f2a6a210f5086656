"""The reward of `bench step`, the same for all: the share of letters in the response. It costs a few microseconds."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """As posttrain calls it."""
    return sum(map(str.isalpha, solution_str)) / max(1, len(solution_str))


def share_of_letters(completions: list[Any], **columns: Any) -> list[float]:
    """As TRL calls it: a batch of chat messages."""
    return [compute_score("", completion[0]["content"], "") for completion in completions]
