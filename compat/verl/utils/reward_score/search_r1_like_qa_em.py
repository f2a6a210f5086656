"""Questions with a list of accepted answers: what stands in the last `<answer>` is one of them, to the word."""

from __future__ import annotations

import re
import string
from typing import Any

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MOST_TAGS = 10  # more than that is a response that tries them all


def normalize_answer(s: str) -> str:
    """In small letters, without punctuation, articles and extra spaces."""
    words = s.lower().translate(str.maketrans("", "", string.punctuation)).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def em_check(prediction: str, golden_answers: str | list[str]) -> int:
    """1 if it is one of the accepted answers."""
    return int(normalize_answer(prediction) in _normal(golden_answers))


def subem_check(prediction: str, golden_answers: str | list[str]) -> int:
    """1 if one of the accepted answers stands in it."""
    text = normalize_answer(prediction)
    return int(any(answer in text for answer in _normal(golden_answers)))


def _normal(golden_answers: Any) -> list[str]:
    return [normalize_answer(one) for one in ([golden_answers] if isinstance(golden_answers, str) else golden_answers)]


def extract_solution(solution_str: str) -> str | None:
    found = _TAGGED.findall(solution_str)
    return found[-1].strip() if found else None


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if right (a quarter with more than 10 answer tags), `format_score` if wrong, 0 without an answer."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    return score / 4 if max(solution_str.count(tag) for tag in ("<answer>", "</answer>")) > _MOST_TAGS else score


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """As `compute_score`, where an accepted answer may stand among other words."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score
