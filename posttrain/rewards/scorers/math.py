"""`math`: competition mathematics (MATH, Hendrycks et al. 2021), whose answers are formulas in `\\boxed{}`.

1.0 if the answers are the same: the same spelling after normalisation, the same number, or the same tuple of these.
What this cannot decide (`2\\sqrt{3}` against `\\sqrt{12}`) goes to math-verify, which is imported only then because it
loads sympy.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

from posttrain.rewards import scorers
from posttrain.rewards.answers import REMARK, final_expression, parse_number, same_number, tidy
from posttrain.rewards.scorers import register_scorer

_TEXT = re.compile(r"\\(?:text|mathrm|textbf|textit|mbox)\s*\{([^{}]*)\}")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_BASED = re.compile(rf"([0-9A-F]+)_\{{?\(?(\d{{1,2}}|{'|'.join(_BASES)})\)?\}}?")
_UNIT = re.compile(
    r"(?P<number>.*\d\s*\)?)\s*(?P<words>[A-Za-z]{2,}\.?(?:\s+[A-Za-z]{2,}\.?){0,3}|(?![万亿])[\u4e00-\u9fff]{1,4})"
)
_NOT_UNITS = {"pi", "sin", "cos", "tan", "log", "ln", "or", "and", "to", "mod"}
_MEMBER = re.compile(r"^\s*[a-zA-Z]\s*\\in\s*")
_SHORT_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
_LONGEST = 300  # sympy's time grows fast with the length; no answer of the data set is longer
_SECONDS = 4


@register_scorer("math", data_sets=("math-500", "math500", "math-lighteval", "hendrycks_math", "competition_math"))
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float | str]:
    """Return 1.0 or 0.0, and the answer that was read as `pred` (empty if there was none)."""
    truth = final_expression(str(ground_truth))
    answer = final_expression(solution_str)
    if answer is not None and normal_form(answer) == normal_form(str(ground_truth)):
        truth = answer  # a long formula as it stands, in which no final answer is found
    if answer is None or truth is None:
        return {"score": 0.0, "pred": ""}
    if "=" in answer and "=" not in truth:
        answer = answer.rpartition("=")[2].strip()
    answer, truth = _MEMBER.sub("", answer), _MEMBER.sub("", truth)
    if parse_number(truth) is not None:
        answer = _without_unit(REMARK.sub("", answer))
    same = same_without_algebra(answer, truth)
    if same is None:
        same = _verify(answer, truth)
    number = parse_number(answer)
    return {"score": float(same), "pred": str(number) if number is not None else normal_form(answer)}


def same_without_algebra(left: str, right: str) -> bool | None:
    """Whether two answers are the same; None if only algebra can tell."""
    if normal_form(left) == normal_form(right):
        return True
    based = _BASED.fullmatch(normal_form(left)), _BASED.fullmatch(normal_form(right))
    if any(based):
        return _same_based(left, right, *based)
    numbers = parse_number(left), parse_number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return same_number(numbers[0], numbers[1])
    if max(len(left), len(right)) > _LONGEST:
        return False
    lefts, rights = _elements(left), _elements(right)
    if len(lefts) > 1 and len(rights) > 1 and normal_form(left)[0] == normal_form(right)[0]:
        if len(lefts) != len(rights):
            return None
        verdicts = [same_without_algebra(a, b) for a, b in zip(lefts, rights, strict=True)]
        ordered = normal_form(left)[0] in "(["
        if ordered and False in verdicts:
            return False
        if ordered and all(verdicts):  # the closing brackets decide between (0, 1) and (0, 1]
            return normal_form(left)[-1] == normal_form(right)[-1]
        return True if all(verdicts) else None
    settled = [_is_word(side) or number is not None for side, number in zip((left, right), numbers, strict=True)]
    return False if all(settled) else None


def _same_based(left: str, right: str, answer: re.Match[str] | None, truth: re.Match[str] | None) -> bool:
    # `52_8` against `52_8` or `52`: the base may be omitted if the ground truth has one, but must not be another.
    bases = [int(_BASES.get(side[2], side[2])) for side in (answer, truth) if side]
    if truth and answer:
        return truth[1] == answer[1] and bases[0] == bases[1]
    if truth:
        return truth[1].casefold() == normal_form(left).casefold()
    number = parse_number(right)
    try:
        return number is not None and answer is not None and int(answer[1], bases[0]) == number.value
    except ValueError:  # a digit that the base does not have
        return False


def normal_form(answer: str) -> str:
    """Unify answers that differ only in LaTeX habits: spaces, `\\left`, `\\dfrac`, `\\text{}`, stops."""
    text = _TEXT.sub(r"\1", tidy(answer)).replace("\\%", "%").replace("\\$", "").replace("$", "")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\,", "").replace("\\ ", "")
    text = _SHORT_FRAC.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
    text = re.sub(r"\\sqrt\s*(\d)", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text).rstrip(".。,")
    return text.casefold() if _is_word(text) else text


def _without_unit(answer: str) -> str:
    # `5 dollars` and 5元 are 5; `2 pi` and `3 or 4` stay as they are.
    match = _UNIT.fullmatch(answer.strip()) if len(answer) <= 100 else None
    if match is None or _NOT_UNITS & set(match["words"].casefold().split()):
        return answer
    return match["number"]


def _is_word(answer: str) -> bool:
    return re.fullmatch(r"[^\W\d_]{3,}", _TEXT.sub(r"\1", answer).strip()) is not None


def _elements(answer: str) -> list[str]:
    text = normal_form(answer)
    if text[:1] in "([" and text[-1:] in ")]":
        text = text[1:-1]
    elif text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def _verify(answer: str, truth: str) -> bool:
    parse, verify = _math_verify()
    # math-verify limits itself with SIGALRM, which needs the main thread; elsewhere the pool's deadline applies.
    seconds: Any = _SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        sides = [parse(f"${side.strip().strip('$')}$", parsing_timeout=seconds) for side in (truth, answer)]
        return bool(all(sides)) and bool(verify(*sides, timeout_seconds=seconds))
    except Exception:  # sympy raises nearly anything on odd input; what cannot be read is not the answer
        return False


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    scorers.before_slow_import()
    from math_verify import parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return parse, verify
