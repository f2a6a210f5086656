"""Reads numbers as they are written: signs, separators (1,234), decimals, fractions, percent, LaTeX, 1.2万."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_WIDE = str.maketrans("０１２３４５６７８９．％－＋−–＄⁄／＝", "0123456789.%-+--$//=")
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?|(?<!\d)\.\d+"
_FRAC = r"\\[dtc]?frac\s*(?:\{\s*(?P<num>-?[\d.,]+)\s*\}|(?P<num1>\d))\s*(?:\{\s*(?P<den>-?[\d.,]+)\s*\}|(?P<den1>\d))"
# A sign counts only if it touches the number and no possible left operand: `10-4` ends in 4, not in -4.
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w.)\]}}])[-+])?(?:\\?\$)?(?P<sign2>(?<=\$)[-+])?(?<![A-Za-z_])"
    rf"(?:(?:(?P<whole>\d+)\s*)?{_FRAC}|(?P<mixed>\d+)\s+(?P<mnum>\d+)/(?P<mden>\d+)"
    rf"|(?P<plain>{_DIGITS})(?:(?P<myriad>[万亿])|\s*/\s*(?P<over>\d[\d,]*(?:\.\d+)?))?)\s*(?P<percent>\\?%)?"
)
_MYRIADS = {"万": 10_000, "亿": 100_000_000}
_UNFINISHED = re.compile(
    r"[\d)}]\s*(?:(?:\\times|\\cdot|\\div|[-+*×÷·]|\bor\b|或者?)\s*[-+]?[\\$\d(]|\^(?!\s*\{?\s*\\circ))|\\sqrt"
)
_WORDS_IN_LATEX = re.compile(r"\\(?:text|mathrm|textbf|mbox|operatorname)\s*\{[^{}]*\}")
_DECORATION = re.compile(
    r"\\left|\\right|\\displaystyle|\\[!;:]|\^\s*(?:\{\s*)?\\circ\s*\}?|°|\\degree|[*`]|\\[()\[\]]"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!)(?=\d{3})")
_LONGEST = 100  # anything longer is no answer, and int() of a huge string is slow


class Number(NamedTuple):
    """An exact value and whether it was written with a percent sign."""

    value: Fraction
    percent: bool

    def __str__(self) -> str:
        """Return the plain spelling, equal for equal values: 42, 0.5, 1/3, 50%."""
        value = self.value
        denominator = value.denominator
        for prime in (2, 5):
            while denominator % prime == 0:
                denominator //= prime
        if value.denominator == 1 or denominator != 1:
            text = str(value)
        else:
            text = repr(float(value))
        return text + "%" * self.percent


def tidy(text: str) -> str:
    """Replace full-width characters by plain ones, and remove LaTeX separators and decoration."""
    text = _THOUSANDS.sub(",", text.translate(_WIDE))
    return _DECORATION.sub("", text)


def parse_number(text: str) -> Number | None:
    """Read the whole text as one number (`\\$1,234.50`, `\\frac{1}{2}`, `x = 5`, `10\\text{ cm}`), or return None."""
    text = _WORDS_IN_LATEX.sub("", tidy(text)).strip().strip("$").strip().rstrip(".。").replace("\\,", "")
    text = re.sub(r"^[A-Za-z]\s*=\s*", "", text).replace("\\$", "$")
    if re.fullmatch(r"([-+]?)\s*\{(.*)\}", text):
        text = text.replace("{", "", 1)[:-1]
    match = _NUMBER.fullmatch(re.sub(r"^([-+])\s+", r"\1", text)) if len(text) <= _LONGEST else None
    return _value(match) if match else None


def find_numbers(text: str) -> list[Number]:
    """Return all numbers in running text, in order."""
    found = (_value(match) for match in _NUMBER.finditer(tidy(text)))
    return [number for number in found if number is not None]


def last_number(text: str) -> Number | None:
    """Return the last number in running text, or None; long texts are read from their end."""
    for tail in (200, 4000, len(text)):
        start = max(0, len(text) - tail)
        # The window may begin inside a number, so a single number that it starts with is not trusted.
        numbers = find_numbers(text[start:])
        if len(numbers) > 1 or (numbers and start == 0):
            return numbers[-1]
    return None


def is_unfinished(text: str) -> bool:
    """Whether a text is an open calculation or choice (`3 \\times 18`, `5 or 6`), which gives no number."""
    return _UNFINISHED.search(_WORDS_IN_LATEX.sub("", text.translate(_WIDE))) is not None


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are the same answer: equal (non-integers within 1e-6), and 50% equals both 50 and 0.5."""
    if _close(left.value, right.value):
        return True
    if left.percent == right.percent:
        return False
    percent, plain = (left, right) if left.percent else (right, left)
    return _close(percent.value / 100, plain.value)


def _close(left: Fraction, right: Fraction) -> bool:
    if left.denominator == 1 and right.denominator == 1:
        return left.numerator == right.numerator
    return abs(left - right) <= min(Fraction(1), max(abs(left), abs(right))) / 1_000_000


def _value(match: re.Match[str]) -> Number | None:
    part = match.groupdict()
    if len(match.group()) > _LONGEST:
        return None
    try:
        if part["plain"] is not None:
            value = _exact(part["plain"])
            if part["over"]:
                value /= _exact(part["over"])
            if part["myriad"]:
                value *= _MYRIADS[part["myriad"]]
        elif part["mixed"] is not None:
            value = int(part["mixed"]) + Fraction(int(part["mnum"]), int(part["mden"]))
        else:
            value = _exact(part["num"] or part["num1"]) / _exact(part["den"] or part["den1"])
            value += int(part["whole"] or 0)
    except (ValueError, ZeroDivisionError):
        return None
    negative = "-" in ((part["sign"] or "") + (part["sign2"] or ""))
    return Number(-value if negative else value, bool(part["percent"]))


def _exact(digits: str) -> Fraction:
    mantissa, _, exponent = digits.replace(",", "").lower().partition("e")
    if len(exponent) > 4:
        raise ValueError("an exponent of this size is not an answer")
    value = Fraction(mantissa)
    return value * Fraction(10) ** int(exponent) if exponent else value
