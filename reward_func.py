"""The rewards that `./train.sh` uses by default: edit this file, or give your own with `--reward_func my_reward.py`.

| data_source           | a response scores 1.0 if                                                      |
|-----------------------|-------------------------------------------------------------------------------|
| math_reasoning        | its final number is the truth's                                               |
| gsm8k, math           | its final answer is the truth's: `#### 1,234`, `\\boxed{\\frac{1}{2}}`, 答案是42 |
| qa, trivia            | its text is one of the accepted answers; case, articles, punctuation are free |
| classification        | it names the right label                                                      |
| code, code_generation | its program passes the row's tests, run in a sandbox (docs/sandbox.md)          |

`posttrain reward try reward_func.py FILE` shows what it makes of your data.
"""

from __future__ import annotations

from typing import Any

from posttrain.rewards import extract_final_answer, score_by_source

__all__ = ["compute_score", "extract_final_answer"]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The reward of one response.

    data_source:  the row's source, which chooses the scorer
    solution_str: the response, without the prompt and special tokens; with what tools said, where there are tools
    ground_truth: the row's truth
    extra_info:   the row's extra_info and its other columns, or None; with tools also `own_words`, what the model wrote
    """
    answer = (extra_info or {}).get("own_words", solution_str)  # what a tool said is no answer of the model's
    result = score_by_source(data_source, answer, ground_truth, extra_info)
    return float(result["score"] if isinstance(result, dict) else result)
