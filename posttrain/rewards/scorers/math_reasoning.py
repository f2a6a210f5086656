"""`math_reasoning`: compares the final number of the response with the final number of the ground truth.

1.0 if both are the same number (42, 42.0, 1,234 and 1234, 50% and 50), else 0.0. The answer is in `\\boxed{}`, after
`####` or in `<answer>`; otherwise it follows "the answer is", or is the last number. Use it for short arithmetic.
"""

from __future__ import annotations

from typing import Any

from posttrain.rewards.answers import extract_final_answer, final_number, same_number
from posttrain.rewards.scorers import register_scorer


@register_scorer("math_reasoning")
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return 1.0 or 0.0, and the number that was read as `pred` (empty if there was none)."""
    truth = final_number(str(ground_truth))
    if truth is None:
        return _score_words(solution_str, str(ground_truth))
    answer = final_number(solution_str)
    if answer is None:
        return {"score": 0.0, "pred": ""}
    return {"score": float(same_number(answer, truth)), "pred": str(answer)}


def _score_words(solution_str: str, ground_truth: str) -> dict[str, float | str]:
    # A ground truth without any number ("yes", "x + y") is compared as words.
    answer = (extract_final_answer(solution_str) or solution_str).strip().rstrip(".。").casefold()
    truth = (extract_final_answer(ground_truth) or ground_truth).strip().rstrip(".。").casefold()
    return {"score": float(bool(truth) and answer == truth), "pred": answer[:100]}
