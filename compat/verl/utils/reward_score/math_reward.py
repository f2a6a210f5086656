"""MATH: 1.0 if what stands in the last `\\boxed{}` is the truth, else 0.0.

Spellings are compared as posttrain's scorer does without algebra: it accepts what verl's string rules accept, and
equal numbers too (0.5 and \\frac{1}{2}).
"""

from __future__ import annotations

import re

from verl.utils.reward_score._boxes import last_boxed


def compute_score(solution_str: str, ground_truth: str) -> float:
    box = last_boxed_only_string(solution_str)
    return float(box is not None and is_equiv(remove_boxed(box), ground_truth))


def last_boxed_only_string(string: str) -> str | None:
    """The last box with its command, or None; also `\\boxed 5`, up to the next dollar sign."""
    if "\\boxed " in string:
        return "\\boxed " + string.rpartition("\\boxed ")[2].partition("$")[0]
    return last_boxed(string)


def remove_boxed(s: str) -> str:
    """What stands in a box."""
    for opening, closing in (("\\boxed ", ""), ("\\boxed{", "}"), ("\\fbox{", "}")):
        if s.startswith(opening) and s.endswith(closing):
            return s[len(opening) : len(s) - len(closing)]
    raise AssertionError(f"not a box: {s}")


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are the same but for their spelling."""
    if str1 is None or str2 is None:
        return str1 is str2
    from posttrain.rewards.scorers.math import same_without_algebra

    left, right = strip_string(str1), strip_string(str2)
    if verbose:
        print(left, right)
    return left == right or bool(same_without_algebra(left, right))


def strip_string(string: str) -> str:
    """One spelling for answers that differ in LaTeX habits, units at the end, and a name before `=`."""
    from posttrain.rewards.scorers.math import normal_form

    text = string.partition("\\text{ ")[0].replace("^{\\circ}", "").replace("^\\circ", "").replace("\\%", "")
    name, equals, value = text.partition("=")
    if equals and len(name) <= 2 and "=" not in value:
        text = value
    text = normal_form(text).replace("\\!", "").replace("\\left", "").replace("\\right", "")
    text = re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
    return re.sub(r"^\.", "0.", text)
