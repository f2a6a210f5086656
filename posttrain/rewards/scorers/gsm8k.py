"""`gsm8k`: grade-school word problems (Cobbe et al. 2021), whose solutions end in `#### N`.

1.0 if the response's final number equals the ground truth's, else 0.0. A number after `####` takes precedence; without
one, `\\boxed{}`, "the answer is" or the last number counts. The ground truth may be the solution or only the number.
"""

from __future__ import annotations

import re
from typing import Any

from posttrain.rewards.answers import find_numbers, result_of
from posttrain.rewards.scorers import math_reasoning, register_scorer

_MARKED = re.compile(r"####\s*+(?:(?:the\s++)?answer\s*+(?:(?:is|:)\s*+)?)?([-+−$\d.][^\n]*+)", re.IGNORECASE)


@register_scorer("gsm8k")
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return 1.0 or 0.0, and the number that was read as `pred` (empty if there was none)."""
    marked = _MARKED.findall(solution_str)
    numbers = find_numbers(result_of(marked[-1])) if marked else []
    return math_reasoning.score(f"#### {numbers[0]}" if numbers else solution_str, ground_truth, extra_info)
