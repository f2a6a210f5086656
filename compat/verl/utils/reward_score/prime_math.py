"""NuminaMath: the answer that a response ends with, compared by posttrain's `math` scorer (numbers, LaTeX, algebra)."""

from __future__ import annotations

from typing import Any


def compute_score(model_output: Any, ground_truth: Any) -> tuple[bool, bool, str]:
    """(whether it is right, whether it has the customary form, the answer that was read)."""
    from posttrain.rewards.scorers import math

    text = str(model_output)
    result = math.score(text, str(ground_truth))
    right = result["score"] == 1.0
    return right, right or ("Step 2:" in text and "\\box" in text), str(result["pred"])


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """Whether two bare answers are the same."""
    if given_answer is None:
        return False
    return compute_score(f"\\boxed{{{given_answer}}}", ground_truth)[0]
