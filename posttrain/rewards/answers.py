"""Finds the final answer of a response or a stored solution, and reads numbers as they are written.

The answer is in `\\boxed{}`, after `####`, in `<answer>`, or after "the answer is" or 答案是; otherwise it is the last
number. Numbers have signs, separators (1,234), decimals, fractions, percent, LaTeX, 1.2万.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from posttrain.rewards.scorers import canonical_source, is_code

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


_HASHES = re.compile(r"####[ \t]*([^\s#][^\n]*)")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_SAYS = re.compile(
    r"(?P<direct>\banswer\**\s*(?:is|are|:|：|=)|答案\**\s*(?:应该|应)?(?:是|为|选|：|:|等于)|结果\s*(?:是|为))|(?P<sentence>答\s*[：:])",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\n|。|！|(?<!\\)[.!](?=\s|$)")
_LATEX_COMMAND = re.compile(r"\\[A-Za-z]+")
_LATEX_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{[^{}]*\}")
_MATH = re.compile(r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL)
REMARK = re.compile(r"(?<=[\w%])\s+[(（].*", re.DOTALL)
_CLAUSE = re.compile(r"\b(?:because|since|which|where)\b|因为|[,，;；](?=\s)")
_SHORT = 100
_BOXES_READ = 20  # from the end; otherwise a response of nothing but unclosed boxes would take quadratic time


def find_boxed(text: str) -> tuple[int, str] | None:
    """Return position and content of the last closed `\\boxed{}` (braces may nest), or None."""
    end = len(text)
    for _ in range(_BOXES_READ):
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        opened = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
        content = _read_braces(text, opened.end()) if opened else None
        if content is not None:
            return start, content.strip()
        end = start
    return None


def explicit_answer(text: str) -> str | None:
    """Return the content of the last answer marker, or None: `\\boxed{...}`, `#### ...` or `<answer>...</answer>`."""
    found = []
    if (box := find_boxed(text)) is not None:
        found.append(box)
    for match in reversed(list(_HASHES.finditer(text))):
        if not is_prose(match.group(1)):  # `#### Step 2: add them up` is a heading
            found.append((match.start(), match.group(1).strip()))
            break
    if (tagged := find_tagged(text)) is not None:
        found.append(tagged)
    return max(found)[1] if found else None


def find_tagged(text: str) -> tuple[int, str] | None:
    """Return position and content of the last `<answer>...</answer>`, or None. Linear, however many are unclosed."""
    opened: re.Match[str] | None = None
    found: tuple[re.Match[str], int] | None = None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            opened = tag  # `put it into <answer> tags: <answer>42</answer>`
        elif opened is not None:
            found, opened = (opened, tag.start()), None
    return (found[0].start(), text[found[0].end() : found[1]].strip()) if found is not None else None


def said_answer(text: str) -> tuple[str, bool] | None:
    """Return what follows the last "the answer is" or 答：, and whether it was 答： (then it is a sentence)."""
    matches = list(_SAYS.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].lstrip(" \t\n*:：")
    said = _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" *,，;；")
    return (said, matches[-1].group("sentence") is not None) if said else None


def final_number(text: str) -> Number | None:
    """Return the number that a text ends up with, or None."""
    return _final_number_of_short(text) if len(text) < _SHORT else _final_number(text)


def _final_number(text: str) -> Number | None:
    explicit = explicit_answer(text)
    if explicit is not None:
        return parse_number(explicit) or last_number(result_of(explicit))
    whole = parse_number(text) if len(text) < _SHORT else None
    if whole is not None:
        return whole
    said = said_answer(text)
    if said is not None:
        clause = said[0] if said[1] else _CLAUSE.split(said[0], maxsplit=1)[0]
        numbers = find_numbers(result_of(clause))
        if numbers or find_numbers(clause):  # an answer that leaves a choice open (`5 or 6`) is none
            return None if not numbers else numbers[-1] if said[1] else numbers[0]
    return last_number(text)


_final_number_of_short = lru_cache(maxsize=4096)(_final_number)  # ground truths and short responses recur


def result_of(answer: str) -> str:
    """Return the part of an answer that holds its number: `18` of `9 * 2 = 18` or `18 (9 * 2)`; empty for `9 * 2`."""
    result = REMARK.sub("", answer).rpartition("=")[2]
    return "" if is_unfinished(result) else result


def final_expression(text: str) -> str | None:
    """Return the expression that a text ends up with (a number, a formula, a word), as it is written, or None."""
    explicit = explicit_answer(text)
    if explicit is not None:
        return explicit
    said = said_answer(text)
    if said is not None:
        math = list(_MATH.finditer(said[0]))
        if math:
            return next(group for group in math[-1].groups() if group)
        number = last_number(said[0]) if said[1] else None
        return said[0] if number is None else str(number)
    text = text.strip()
    if text and len(text) <= 200 and not is_prose(text):
        return text
    math = list(_MATH.finditer(text))
    if math:
        return next(group for group in math[-1].groups() if group).rpartition("=")[2].strip()
    number = last_number(text)
    return str(number) if number is not None else None


def extract_final_answer(solution_str: str) -> str | None:
    """Return the final answer as text: `42` for `15 + 27 = 42`, `\\boxed{42}`, `#### 42` and 答案是42; else None."""
    explicit = explicit_answer(solution_str)
    if explicit is not None and parse_number(explicit) is None:
        return explicit
    number = final_number(solution_str)
    if number is not None:
        return str(number)
    said = said_answer(solution_str)
    return said[0] if said is not None else None


def is_prose(text: str) -> bool:
    """Whether a text is prose rather than an answer: three words or more outside LaTeX, or a heading."""
    bare = _LATEX_COMMAND.sub(" ", _LATEX_WORDS.sub(" ", text))
    words = re.findall(r"[A-Za-z]{3,}", bare)
    return len(words) >= 3 or bool(re.match(r"\s*(?:step|solution|answer|final|explanation)\b", bare, re.IGNORECASE))


def _read_braces(text: str, start: int) -> str | None:
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth == 0:
                return text[start : match.start()]
    return None


# Sources for which the whole response is the answer.
_WHOLE = ("qa", "trivia", "classification")


def read_answer(data_source: str | None, response: str) -> str | None:
    """Return what a response answered, if its reward does not report it; None for programs, or if nothing is found."""
    if is_code(data_source):
        return None
    if canonical_source(str(data_source)) in _WHOLE:
        return response.strip() or None
    return extract_final_answer(response)
