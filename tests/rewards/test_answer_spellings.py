"""Spellings of an answer that count, and those that must not: Chinese phrasing, units, bases, open calculations."""

import importlib.util
from pathlib import Path

import pytest

from posttrain.rewards import score_by_source

NUMBERS = [
    ("答案是 42", "42", 1),
    ("所以答案为：４２。", "42", 1),
    ("答案：3/4", "0.75", 1),
    ("答案：３／４", "3/4", 1),
    ("答案是1,234元", "1234", 1),
    ("答：一共有1.2万人。", "12000", 1),
    ("因此，答案应为 -7。", "-7", 1),
    ("答案等于 50%", "50", 1),
    ("The answer is 42%.", "0.42", 1),
    ("The answer is 1 1/2 cups.", "1.5", 1),
    ("Answer: $-3.5", "-3.5", 1),
    ("the answer is: 1,234.50 dollars.", "1234.5", 1),
    ("The answer is 10-4 = 6.", "6", 1),
    ("#### 9 * 2 = 18", "18", 1),
    ("#### 18 (9 * 2)", "18", 1),
    ("答案是：四十二", "42", 0),
    ("The answer is 5 or 6", "5", 0),
    ("\\boxed{5 or 6}", "6", 0),
    ("\\boxed{2 \\times -3}", "-3", 0),
    ("\\boxed{18 + 3}", "3", 0),
]
FORMULAS = [
    ("1,-2", "-2,1", 1),
    ("1+\\sqrt{19}, 1-\\sqrt{19}", "1 \\pm \\sqrt{19}", 1),
    ("1+\\sqrt{19}", "1 \\pm \\sqrt{19}", 0),
    ("864", "864 \\mbox{ inches}^2", 1),
    ("[-2,7]", "x \\in [-2,7]", 1),
    ("2x+3", "y = 2x + 3", 1),
    ("C", "\\text{(C)}", 1),
    ("52", "52_8", 1),
    ("52_{\\text{eight}}", "52_8", 1),
    ("52_9", "52_8", 0),
    ("52_8", "42", 1),
    ("52_8", "52", 0),
    ("5 dollars", "5", 1),
    ("2 pi", "2", 0),
]


@pytest.mark.parametrize("source", ["gsm8k", "math_reasoning", "math"])
def test_numbers_in_words_around_them(source):
    wrong = [
        (response, truth)
        for response, truth, score in NUMBERS
        if score_by_source(source, response, truth)["score"] != score
    ]
    assert wrong == []


def test_formulas_of_competitions():
    wrong = [
        (answer, truth)
        for answer, truth, score in FORMULAS
        if score_by_source("math", f"\\boxed{{{answer}}}", truth)["score"] != score
    ]
    assert wrong == []


def test_the_check_on_data_sets_finds_no_disagreement_on_rows_of_their_kinds():
    path = Path(__file__).resolve().parents[2] / "scripts" / "check_answers.py"
    spec = importlib.util.spec_from_file_location("check_answers", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    numbers = [("18", "She has 9 * 2 = <<9*2=18>>18.\n#### 18"), ("-1,250", "#### -1,250"), ("7", "#### 7")]
    formulas = [
        ("\\frac{3}{4}", "so $\\boxed{\\frac{3}{4}}$."),
        ("6 - 5i", "\\boxed{6 - 5i}"),
        ("(3,4]", "\\boxed{(3,4]}"),
    ]
    for source, rows in (("gsm8k", numbers), ("math", formulas)):
        for kind, (count, listed) in script.check(source, rows).items():
            assert count and listed == [], kind


@pytest.mark.parametrize(
    "truth",
    [
        "7" * 301,
        " + ".join(f"{n}x^{{{n}}}" for n in range(2, 40)),
        "\\begin{pmatrix}" + "1 & 2 \\\\ " * 30 + "\\end{pmatrix}",
    ],
    ids=["integer", "polynomial", "matrix"],
)
def test_long_formula_that_stands_alone_is_the_reference_answer(truth):
    assert len(truth) > 200
    assert score_by_source("math", f"So \\boxed{{{truth}}}", truth)["score"] == 1
    assert score_by_source("math", f"So \\boxed{{{truth.replace('7', '8').replace('2', '3')}}}", truth)["score"] == 0
