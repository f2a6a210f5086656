#!/usr/bin/env python3
"""Scores the truths of GSM8K and MATH-500 as responses, in many spellings, and wrong copies of them.

    python scripts/check_answers.py gsm8k/test.jsonl math500.jsonl [--shown 20]

Every spelling of a truth must score 1: bare, boxed, after `####`, in tags, in an English and a Chinese sentence, with
other separators, other LaTeX, full-width digits, and the data set's own solution. Every copy with one thing changed
must score 0: a number off by one, the sign, a fraction, a digit, the expression, the answer of another row.
Disagreements are listed; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from posttrain.rewards import score_by_source

SENTENCES = {
    "bare": "{}",
    "\\boxed{}": "We add them up.\n\\boxed{{{}}}",
    "#### ": "First 12, then 30.\n#### {}",
    "<answer>": "<think>12 and 30, so</think>\n<answer>{}</answer>",
    "the answer is": "There are 12 of them in 30 rows. The answer is {}.",
    "**Answer:**": "12 steps later:\n\n**Answer:** {}",
    "答案是": "第12步：合计。所以答案是 {}。",
    "答案：": "一共30行。\n答案：{}",
}
WIDE = str.maketrans("0123456789.%-+", "０１２３４５６７８９．％－＋")
NUMBER = re.compile(r"-?\d+")
FRACTION = re.compile(r"\\[dt]?frac\{([^{}]+)\}\{([^{}]+)\}|(?<![\d.])(\d+)/(\d+)(?![\d.])")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check the scorers of answers on GSM8K and MATH-500.")
    parser.add_argument("gsm8k", type=Path, help="test.jsonl with `answer`")
    parser.add_argument("math500", type=Path, help="jsonl with `answer` and `solution`")
    parser.add_argument("--shown", type=int, default=20, help="disagreements to list of each kind (default 20)")
    options = parser.parse_args()
    wrong: dict[str, list[str]] = {}
    print("| data | responses | kind | should score | agree | disagree |\n|---|---|---|---|---|---|")
    for source, rows in (("gsm8k", read_gsm8k(options.gsm8k)), ("math", read_math(options.math500))):
        start = time.monotonic()
        for kind, (count, listed) in check(source, rows).items():
            want = 0 if kind in PERTURBED else 1
            print(f"| {source} | {count} | {kind} | {want} | {count - len(listed)} | {len(listed)} |", flush=True)
            wrong[f"{source}, {kind}"] = listed
        print(f"{source}: {len(rows)} rows in {time.monotonic() - start:.0f} s", file=sys.stderr)
    for kind, listed in wrong.items():
        for line in listed[: options.shown]:
            print(f"! {kind}: {line}")
    sys.exit(any(wrong.values()))


def read_gsm8k(path: Path) -> list[tuple[str, str]]:
    """(answer, solution) of each row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["answer"].rpartition("####")[2].strip(), row["answer"]) for row in rows]


def read_math(path: Path) -> list[tuple[str, str]]:
    """As `read_gsm8k`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["answer"], row["solution"]) for row in rows]


def check(source: str, rows: list[tuple[str, str]]) -> dict[str, tuple[int, list[str]]]:
    """Kind -> how many responses, and those that got the other score."""
    counts: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    for place, (answer, solution) in enumerate(rows):
        other = next((a for a, _ in rows[place + 1 :] + rows[:place] if score(source, a, answer) == 0.0), "")
        for kind, text in [*spellings(answer, solution), *perturbations(answer, other)]:
            counts[kind] += 1
            got = score(source, text, answer)
            listed = wrong.setdefault(kind, [])
            if got != (0.0 if kind in PERTURBED else 1.0):
                listed.append(f"row {place}: truth {answer!r}, response {text[-120:]!r} scores {got:g}")
    return {kind: (counts[kind], wrong[kind]) for kind in counts}


def score(source: str, response: str, truth: str) -> float:
    result = score_by_source(source, response, truth)
    return float(result["score"] if isinstance(result, dict) else result)


def spellings(answer: str, solution: str) -> Iterator[tuple[str, str]]:
    """Responses that are right."""
    for kind, sentence in SENTENCES.items():
        yield kind, sentence.format(answer)
    yield "the solution", solution
    single = "=" not in answer and "," not in answer
    yield "$...$", f"So we get $x = {answer}$." if single else f"The answer is ${answer}$."
    if re.fullmatch(r"-?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?", answer):
        plain = answer.replace(",", "")
        yield "full-width", f"答案是{plain.translate(WIDE)}。"
        yield "with a unit", f"The answer is {plain} apples."
        yield "in dollars", f"\\boxed{{\\${float(plain):,.2f}}}"
        yield "separators", f"#### {int(plain):,}" if "." not in plain else f"#### {plain}0"
        yield "percent", f"\\boxed{{{plain}\\%}}"
    if fraction := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", answer):
        sign, top, bottom = fraction.groups()
        yield "fraction", f"答案：{sign}{top}/{bottom}"
        yield "fraction", f"The answer is ${sign}\\dfrac{{{top}}}{{{bottom}}}$."
        yield "fraction", f"\\boxed{{\\tfrac{{{sign}{2 * int(top)}}}{{{2 * int(bottom)}}}}}"
        yield "decimal", f"\\boxed{{{sign}{int(top) / int(bottom):.9f}}}"
    if "\\" in answer:
        loose = re.sub(r"\\left|\\right(?!a)", "", answer).replace("\\frac", "\\dfrac").replace("\\sqrt{", "\\sqrt {")
        yield "other LaTeX", f"\\boxed{{{loose}}}"
        yield "other LaTeX", f"$$\\boxed{{ {answer} }}.$$"


PERTURBED = ("off by one", "sign", "other fraction", "dropped digit", "other expression", "another row's answer")


def perturbations(answer: str, other: str) -> Iterator[tuple[str, str]]:
    """Responses that are wrong: one thing of the truth changed."""
    boxed = "\\boxed{{{}}}".format
    for match in list(NUMBER.finditer(answer))[:3]:
        yield "off by one", boxed(put(answer, match, str(int(match.group()) + 1)))
    if (minus := negated(answer)) is not None:
        yield "sign", boxed(minus)
    for match in FRACTION.finditer(answer):
        top, bottom = match[1] or match[3], match[2] or match[4]
        if top != bottom:
            yield "other fraction", boxed(put(answer, match, f"\\frac{{{bottom}}}{{{top}}}"))
    text = re.sub(r",\\!\s?", "", answer)
    for match in list(re.finditer(r"\d{2,}", text))[:2]:
        if not (match.group().endswith("0") and text[: match.start()].endswith(".")):
            yield "dropped digit", boxed(put(text, match, match.group()[:-1]))
        if match.group()[0] != "0":
            yield "dropped digit", boxed(put(text, match, match.group()[1:]))
    for changed in other_expressions(answer):
        yield "other expression", boxed(changed)
    if other:
        yield "another row's answer", boxed(other)


def put(text: str, match: re.Match[str], new: str) -> str:
    return text[: match.start()] + new + text[match.end() :]


def negated(answer: str) -> str | None:
    """The answer with the other sign, None where that would say the same or nothing."""
    left, equals, right = answer.rpartition("=")
    right = right.strip()
    if right == "0" or re.search(r"text|cup|\\in\b|\\{|_|,(?!\d{3}|\\)", right):
        return None
    if right.startswith("-"):
        return left + equals + right[1:]
    return f"{left}{equals}-({right})" if re.search(r"\w\s*[-+]", right) else f"{left}{equals}-{right}"


def other_expressions(answer: str) -> Iterator[str]:
    """One operator, root, bracket or name changed."""
    if match := re.search(r"(?<=[\w})] )[-+](?= )|(?<=\w)[-+](?=\w)", answer):
        yield put(answer, match, "-" if match.group() == "+" else "+")
    if match := re.search(r"\\sqrt\{(\w+)\}|\\sqrt(\d)", answer):
        yield put(answer, match, f"({match[1] or match[2]})")
    if answer.endswith(("]", ")")) and "," in answer and not answer.endswith("\\right)"):
        yield answer[:-1] + (")" if answer.endswith("]") else "]")
    if "\\pi" in answer:
        yield answer.replace("\\pi", "e", 1)
    if re.search(r"_\{?\d", answer):
        yield re.sub(r"_\{?\d\}?", "_{7}", answer)
    if re.fullmatch(r"-?[\d.]+(,\d{3})*", answer):
        yield f"2 \\times {answer}" if answer != "0" else "0 + 1"
        yield f"{answer} + 3"
        yield f"{answer}^{{2}}" if set(answer) - set("-01,") else "\\sqrt{2}"
    elif not answer.endswith("0"):
        yield answer + "x"


if __name__ == "__main__":
    main()
