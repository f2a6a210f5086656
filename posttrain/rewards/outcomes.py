"""Reads what a reward function returned (a finite number, or a dict with `score` and parts), and reports failures."""

from __future__ import annotations

import importlib.util
import math
import os
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.rewards.types import Fields, RewardError
from posttrain.settings import LARGEST_SCORE

# Score, named parts, and the error that makes the score invalid, if any.
Outcome = tuple[float, dict[str, "float | str"], "str | None"]
# Returns one outcome per response; gets one response, or all of a group.
ScoreItems = Callable[[Sequence[Fields]], list[Outcome]]

_PART_CHARS = 200
# The error of a response without a score: its advantage is 0, and it is not part of its group's baseline.
NONE_APPLIES = "no reward function applies to this response: each returned None"


def call_and_read(call: Callable[[Sequence[Fields]], Any], items: Sequence[Fields], form: str) -> list[Outcome]:
    """Return one outcome per item; whatever the user's function raises becomes an outcome."""
    try:
        if form != "list":
            return [read_result(call([item])) for item in items]
        return read_results(call(items), len(items))
    except BaseException as error:
        return [failure(describe_exception(error))] * len(items)


def read_results(results: Any, count: int) -> list[Outcome]:
    results = results.tolist() if hasattr(results, "tolist") else results
    wrong = check_length(results, count)
    return [failure(wrong)] * count if wrong else [read_result(one) for one in results]


def check_length(results: Any, count: int) -> str | None:
    """Return what is wrong with a list of results for `count` responses; None if nothing is."""
    if not isinstance(results, list | tuple):
        return f"returned {_kind(results)}, not a list of {count} scores"
    return f"returned {len(results)} scores for {count} responses" if len(results) != count else None


def read_result(result: Any) -> Outcome:
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
    return (0.0, {}, error)


def read_part(value: Any) -> float | str:
    """Convert a named part to what is recorded: a number, or a short text."""
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


_HERE = os.path.dirname(os.path.abspath(__file__))
_FRAMES = 3
_LONGEST = 500


def describe_exception(error: BaseException) -> str:
    """Return `NameError: name 'torch' is not defined (add `import torch`)`, then the innermost lines of user code."""
    said = text_of(error, _LONGEST)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit):
        text = f"the function called exit({error.code!r})"
    if isinstance(error, RewardError):
        text = said
    if isinstance(error, NameError) and error.name and _importable(error.name):
        text += f" (the file never imports it: add `import {error.name}`)"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_own_frame(f.filename)]
    lines = [f"  {f.filename}, line {f.lineno}, in {f.name}: {f.line or ''}".rstrip(": ") for f in frames[-_FRAMES:]]
    return "\n".join([text[:_LONGEST], *lines])


def text_of(value: object, most: int) -> str:
    """Return a value's text, cut; if `str` fails (an integer beyond 4,300 digits, a faulty `__str__`), describe it."""
    try:
        return str(value)[:most]
    except Exception:
        if isinstance(value, int):
            return f"an integer of some {round(value.bit_length() * math.log10(2))} digits"
        return f"a {type(value).__name__} that has no text"


def explain_import_failure(error: BaseException, what: str) -> RewardError:
    """Build the RewardError for a user's file that could not be imported."""
    if isinstance(error, SyntaxError):
        return RewardError(
            f"syntax error in {error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}",
            todo="correct that line",
        )
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return RewardError(
        f"importing the reward {what} failed: {describe_exception(error)}",
        todo=f"install {missing}, or correct the import" if missing else "correct the file; workers import it as it is",
    )


def _is_own_frame(filename: str) -> bool:
    return filename.startswith((_HERE, "<frozen")) or f"{os.sep}importlib{os.sep}" in filename


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# Once there were scores, this many batches in a row may fail: a server may be restarting.
PATIENCE = 3
TRY = "correct it; `posttrain reward try FN DATA` shows what a reward makes of data, without a model"


class AllFailed(RewardError):
    """No response of a batch could be scored; the text says why."""


class FailureWatch:
    """Checks the errors of every batch of one reward, and raises AllFailed if it gives no scores.

    A reward that fails on a whole batch before it ever gave a score is wrong, and stops the run at once: nothing could
    be learnt from it. A reward that worked before gets a few more batches.
    """

    def __init__(self, what: str = "reward", where: str = "", do: str = "") -> None:
        self.what, self.where, self.do = what, where, do or TRY
        self._worked, self._in_a_row = False, 0

    def check(self, errors: Sequence[str | None]) -> None:
        """`errors` has one entry per response: why it could not be scored, or None."""
        if not errors:
            return
        if any(error is None for error in errors):
            self._worked, self._in_a_row = True, 0
            return
        self._in_a_row += 1
        if not self._worked or self._in_a_row >= PATIENCE:
            raise all_failed_error(
                [error or "" for error in errors], self.what, self.where, self.do, batches=self._in_a_row
            )


def all_failed_error(
    errors: Sequence[str], what: str = "reward", where: str = "", do: str = TRY, *, batches: int = 1
) -> AllFailed:
    often = Counter(errors).most_common()
    reason = often[0][0].replace("\n", "\n    ")
    others = f"\n  and {len(often) - 1} other errors" if len(often) > 1 else ""
    last = f" of each of the last {batches} batches" if batches > 1 else ""
    return AllFailed(
        f"The {what} failed on all {len(errors)} responses{last}, so that nothing can be learnt:\n    {reason}{others}",
        where,
        do,
    )
