"""verl's rule for GSM8K: the number after the last `#### `, to the letter; `flexible` takes the last number.

posttrain's own scorer (data_source=gsm8k) compares numbers and knows more ways of giving an answer.
"""

from __future__ import annotations

import re
from typing import Any

_READ = 300  # characters from the end: an answer stands there
_NUMBER = r"-?[0-9.,]+"


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The answer as it is written, or None."""
    assert method in ("strict", "flexible"), f"method is strict or flexible, not {method}"
    text = solution_str[-_READ:]
    if method == "strict":
        marked = re.findall(f"#### ({_NUMBER})", text)
        return marked[-1].replace(",", "") if marked else None
    found = re.findall(_NUMBER, text)
    return next((number for number in reversed(found) if number != "."), found[0] if found else None)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` if the answer is the truth, `format_score` if there is another, 0 if there is none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
