"""What a reward function returned, read as scores: a finite number, or a dict with `score` and named parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.config.reward import LARGEST_SCORE
from posttrain.rewards.failures import describe_exception, text_of
from posttrain.rewards.signatures import Fields

Outcome = tuple[float, dict[str, "float | str"], "str | None"]
"""Score, named parts, and the error because of which the score does not count."""
ScoreItems = Callable[[Sequence[Fields]], list[Outcome]]
"""One outcome per response; the responses are one, or those of a group."""

_PART_CHARS = 200
NONE_APPLIES = "no reward function applies to this response: each returned None"
"""The error of a response that has no score: its advantage is 0, and it is left out of its group's baseline."""


def outcomes_of(call: Callable[[Sequence[Fields]], Any], items: Sequence[Fields], form: str) -> list[Outcome]:
    """One outcome per item; whatever the user's function does is turned into an outcome."""
    try:
        if form != "list":
            return [read_result(call([item])) for item in items]
        return read_results(call(items), len(items))
    except BaseException as error:
        return [failure(describe_exception(error))] * len(items)


def read_results(results: Any, count: int) -> list[Outcome]:
    """The outcomes of a list of results for `count` responses."""
    results = results.tolist() if hasattr(results, "tolist") else results
    wrong = not_a_list(results, count)
    return [failure(wrong)] * count if wrong else [read_result(one) for one in results]


def not_a_list(results: Any, count: int) -> str | None:
    """What is wrong with what should be one result for each of `count` responses; None if nothing is."""
    if not isinstance(results, list | tuple):
        return f"returned {_kind(results)}, not a list of {count} scores"
    return f"returned {len(results)} scores for {count} responses" if len(results) != count else None


def read_result(result: Any) -> Outcome:
    """The outcome of one result."""
    parts: dict[str, float | str] = {}
    if isinstance(result, dict):
        if "score" not in result:
            names = ", ".join(text_of(name, _PART_CHARS) for name in result)
            return failure(f"returned a dict without 'score' (keys: {names or 'none'})")
        parts = {text_of(name, _PART_CHARS): read_part(value) for name, value in result.items() if name != "score"}
        result = result["score"]
    if result is None or isinstance(result, str | bytes):
        return failure(f"returned {_kind(result)} instead of a number")
    try:
        score = float(result)
    except OverflowError:
        return failure(f"returned {text_of(result, 60)}{TOO_LARGE}")
    except (TypeError, ValueError, RuntimeError):
        return failure(f"returned {_kind(result)} instead of a number")
    if not math.isfinite(score):
        return failure(f"returned {score}")
    return (score, parts, None) if is_usable(score) else failure(f"returned {score:g}{TOO_LARGE}")


TOO_LARGE = f": scores end at {LARGEST_SCORE:g}, training could not square larger ones"


def is_usable(score: float) -> bool:
    """Whether a score can be trained on: finite, and small enough."""
    return abs(score) <= LARGEST_SCORE


def failure(error: str) -> Outcome:
    """The outcome of a response that could not be scored."""
    return (0.0, {}, error)


def read_part(value: Any) -> float | str:
    """A named part as it is recorded: a number, or a short text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            number = float(value)
            if is_usable(number):
                return number
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    return text_of(value, _PART_CHARS)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__} ({text_of(value, 60)!r})"
