"""Whether what a program gave is what its test expects: texts but for spaces, numbers but for rounding.

Only a number that is expected with a fraction (`0.5`, `3.0`, `1e-7`) may be rounded. Where a whole number is expected
the value must be exactly that one: as floats 1000000007 and 1000000009 differ by less than the tolerance.
"""

from __future__ import annotations

import ast
import json
import math
import re
from decimal import Decimal
from typing import Any

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9
_PRINTED = 10**4000
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")


def same_text(got: str, expected: str) -> bool:
    """Whether two outputs are the same, line by line and word by word; 0.5 and 0.50 are the same word."""
    lines = [[line.split() for line in text.strip().splitlines() if line.strip()] for text in (got, expected)]
    if len(lines[0]) != len(lines[1]):
        return False
    return all(
        len(left) == len(right) and all(map(_same_word, left, right)) for left, right in zip(*lines, strict=True)
    )


def same_value(got: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one, which came out of JSON: no tuples, no sets, keys are texts."""
    if _same(got, expected):
        return True
    if isinstance(expected, list) and len(expected) == 1 and _same(got, expected[0]):
        return True  # some data sets wrap every output in a list
    if isinstance(expected, str):  # some write every output as a text
        for read in (json.loads, ast.literal_eval):
            try:
                return _same(got, read(expected))
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
    return False


def _same(got: Any, expected: Any) -> bool:
    if isinstance(got, bool) or isinstance(expected, bool):
        return type(got) is type(expected) and got == expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        # Python compares an int with a float exactly, however large they are.
        return got == expected or (isinstance(expected, float) and _close(got, expected))
    if isinstance(got, set | frozenset) and isinstance(expected, list):
        return len(got) == len(expected) and _same_members(list(got), expected)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        by_text = {_key(key): value for key, value in got.items()}
        others = {_key(key): value for key, value in expected.items()}
        if len(by_text) < len(got) or by_text.keys() != others.keys():  # {1: a, "1": b} is no object of JSON
            return False
        return all(_same(value, others[key]) for key, value in by_text.items())
    if type(got).__module__ == "numpy":
        return _same(got.tolist(), expected)  # pyright: ignore
    return type(got) is type(expected) and got == expected


def _key(key: Any) -> str:
    """A key as JSON writes it; integers of more digits than Python prints in another way."""
    return hex(key) if isinstance(key, int) and abs(key) > _PRINTED else str(key)


def _same_members(got: list[Any], expected: list[Any]) -> bool:
    """Whether each member has a partner of its own, so that [1, 1, 2] is not the set of 1, 2 and 3."""
    left = list(got)
    for other in expected:
        place = next((i for i, one in enumerate(left) if _same(one, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if _WHOLE.fullmatch(expected):
        return _NUMBER.fullmatch(got) is not None and Decimal(got) == Decimal(expected)
    try:
        return _close(float(got), float(expected))
    except ValueError:
        return False


def _close(got: float, expected: float) -> bool:
    try:
        return math.isclose(got, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer beyond all floats
        return False
