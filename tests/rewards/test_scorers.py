"""Built-in scorers: which spellings of an answer count, by data source."""

import signal
import subprocess
import sys
import time

import pytest

from posttrain.rewards import RewardError, answers, check_sources, extract_final_answer, known_sources, score_by_source
from posttrain.rewards.answers import find_numbers, parse_number
from posttrain.rewards.scorers import SCORERS
from posttrain.rewards.scorers import math as math_scorer
from posttrain.rewards.scorers.code_tests import extract_program


def score(source, response, truth, extra=None):
    result = score_by_source(source, response, truth, extra)
    assert isinstance(result, dict)
    return result["score"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("-42", "-42"),
        ("−42", "-42"),
        ("- 42", "-42"),
        ("1,234", "1234"),
        ("1{,}234.50", "1234.5"),
        ("\\$1,234", "1234"),
        ("-$5", "-5"),
        ("0.50", "0.5"),
        (".5", "0.5"),
        ("\\frac{1}{2}", "0.5"),
        ("\\dfrac12", "0.5"),
        ("-\\frac{1}{3}", "-1/3"),
        ("3/4", "0.75"),
        ("2\\frac{1}{2}", "2.5"),
        ("1 1/2", "1.5"),
        ("50\\%", "50%"),
        ("1.5e3", "1500"),
        ("x = 7", "7"),
        ("10\\text{ cm}", "10"),
        ("90^\\circ", "90"),
        ("４２", "42"),
    ],
)
def test_one_number_is_read_in_all_its_spellings(text, value):
    assert str(parse_number(text)) == value


@pytest.mark.parametrize("text", ["", "x", "42 or 43", "3, 4", "1/0", "1e999999999", "9" * 5000, "2x"])
def test_what_is_no_single_number_is_none(text):
    assert parse_number(text) is None


def test_a_minus_between_two_numbers_is_no_sign():
    assert [str(n) for n in find_numbers("10-4, 5 - 3, is -7, (-8), x-9")] == ["10", "4", "5", "3", "-7", "-8", "9"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("15 + 27 = 42", "42"),
        ("\\boxed{42}", "42"),
        ("#### 42", "42"),
        ("First 15, then 27.\n#### 1,234", "1234"),
        ("The answer is 42 because 6 * 7.", "42"),
        ("**Answer:** 42", "42"),
        ("The answer is:\n42", "42"),
        ("答案是42", "42"),
        ("最终答案为：42。", "42"),
        ("每人21个。\n答：两人一共有42个苹果。", "42"),
        ("<answer>42</answer> (7 checks)", "42"),
        ("so \\boxed{7}? No: \\boxed{42}", "42"),
        ("\\boxed{7}\n#### 42", "42"),
        ("#### Step 2: add\nIt is 42", "42"),
        ("\\boxed{\\sqrt{2}}", "\\sqrt{2}"),
        ("no idea", None),
        ("", None),
    ],
)
def test_final_answer_is_extracted(text, answer):
    assert extract_final_answer(text) == answer


def test_boxed_answers_may_nest_braces_and_hash_answers_may_have_signs_and_separators():
    assert extract_final_answer("\\boxed{\\frac{\\sqrt{2}}{2}}") == "\\frac{\\sqrt{2}}{2}"
    assert score("math", "\\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert score("gsm8k", "#### -1,234", "-1234") == 1.0
    assert score("gsm8k", "#### 1,234", "1") == 0.0
    assert score("gsm8k", "#### 5", "-5") == 0.0


@pytest.mark.parametrize("source", ["math_reasoning", "gsm8k", "math"])
def test_numbers_match_by_value(source):
    for right in ("42", "42.0", "The answer is 42.", "#### 42", "\\boxed{42}", "... so x = 42", "答案是42", "答：42。"):
        assert score(source, right, "42") == 1.0, right
    for wrong in ("420", "4.2", "-42", "The answer is 41.", "#### 41", "\\boxed{4}", "", "none", "42 + 1 = 43"):
        assert score(source, wrong, "42") == 0.0, wrong


@pytest.mark.parametrize("source", ["math_reasoning", "gsm8k", "math"])
def test_truth_may_be_a_number_or_a_solution_that_ends_in_it(source):
    solution = "She sells 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $18.\n#### 18"
    for truth in ("18", 18, "$18", "18.0", solution, "\\boxed{18}"):
        assert score(source, "#### 18", truth) == 1.0, truth
        assert score(source, "#### 9", truth) == 0.0, truth
    assert score(source, solution, solution) == 1.0


def test_separators_fractions_and_percent():
    assert score("gsm8k", "#### 1,234", "1234") == 1.0
    assert score("gsm8k", "#### 1234 dollars", "1,234") == 1.0
    assert score("math", "\\boxed{\\frac{1}{2}}", "0.5") == 1.0
    assert score("math", "\\boxed{0.5}", "\\frac{1}{2}") == 1.0
    assert score("math", "\\boxed{50\\%}", "50") == score("math", "\\boxed{50\\%}", "0.5") == 1.0
    assert score("math", "\\boxed{50}", "0.5") == 0.0
    assert score("math", "\\boxed{0.333333}", "\\frac13") == 1.0
    assert score("math", "\\boxed{10000001}", "10000002") == 0.0


def test_gsm8k_takes_the_number_after_its_own_marker_first():
    assert score_by_source("gsm8k", "#### 42\n(that is \\boxed{6} times 7)", "42") == {"score": 1.0, "pred": "42"}


def test_plain_math_path_decides_the_common_cases_without_sympy(monkeypatch):
    monkeypatch.setattr(math_scorer, "_verify", lambda *_: pytest.fail("asked math-verify"))
    same = [
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})"),
        ("\\boxed{\\dfrac12}", "\\frac{1}{2}"),
        ("\\boxed{x^2 + 1}", "x^2+1"),
        ("\\boxed{\\text{Evelyn}}", "Evelyn"),
        ("\\boxed{(1, 0.5)}", "(1, \\frac{1}{2})"),
        ("So the answer is $2\\sqrt{3}$.", "2\\sqrt3"),
        ("Hence $x = \\frac34$ as was to be shown.", "0.75"),
    ]
    for response, truth in same:
        assert score("math", response, truth) == 1.0, response
    for response, truth in [
        ("\\boxed{(0,1]}", "(0,1)"),
        ("\\boxed{(1,2)}", "(1,3)"),
        ("\\boxed{Bob}", "\\text{Evelyn}"),
    ]:
        assert score("math", response, truth) == 0.0, response


def test_math_falls_back_to_algebra_for_formulas():
    assert score("math", "\\boxed{2\\sqrt{3}}", "\\sqrt{12}") == 1.0
    assert score("math", "\\boxed{x^2+2x+1}", "(x+1)^2") == 1.0
    assert score("math", "\\boxed{x^2+2x+2}", "(x+1)^2") == 0.0
    assert score("math", "\\boxed{\\frac{", "5") == 0.0


def test_sympy_is_not_imported_for_numbers():
    code = (
        "import sys; from posttrain.rewards import score_by_source as s; "
        "assert s('math', '\\\\boxed{\\\\frac{1}{2}}', '0.5')['score'] == 1.0; "
        "bad = {'sympy', 'math_verify', 'torch', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WITHOUT_ANSWER = [
    *("\\boxed{" * 20000, "1" * 200000, "#### " * 20000, "1e999999999 " * 1000, "$" * 50001),
    *("", "\x00", "\ud800", "no answer"),
]
# Ground truths of sources for which `42` is none; rows of reasoning_gym are scored by that package.
GROUND_TRUTHS = {"code": "assert answer == 42", "code_generation": "assert answer == 42"}


@pytest.mark.parametrize("source", [source for source in SCORERS if source != "reasoning_gym"])
def test_text_without_an_answer_scores_0_never_raises_and_takes_little_of_the_processor(source):
    """A pattern that is quadratic in it would take minutes."""
    start = time.process_time()
    for text in WITHOUT_ANSWER:
        assert score(source, text, GROUND_TRUTHS.get(source, "42")) == 0.0, text[:20]
    assert time.process_time() - start < 10.0


@pytest.mark.parametrize("source", ["qa", "trivia"])
def test_text_match_ignores_case_articles_and_punctuation(source):
    for right in ("the Eiffel Tower!", "EIFFEL TOWER", "An eiffel   tower.", "The answer is the Eiffel Tower."):
        assert score(source, right, "The Eiffel Tower") == 1.0, right
    assert score(source, "It is in Paris, near the Eiffel Tower.", "The Eiffel Tower") == 1.0
    assert score(source, "<answer>Paris</answer> or the Eiffel Tower", "The Eiffel Tower") == 0.0
    assert score(source, "Tower Bridge", "The Eiffel Tower") == 0.0
    assert score(source, "Eiffel Towers", "The Eiffel Tower") == 0.0
    assert score(source, "", "The Eiffel Tower") == 0.0


def test_a_list_of_accepted_answers_works():
    for truth in (["14 December 1972", "December 1972"], '["14 December 1972", "December 1972"]'):
        assert score("qa", "december 1972", truth) == 1.0
        assert score("qa", "14 December, 1972.", truth) == 1.0
        assert score("qa", "1973", truth) == 0.0
    assert score("qa", "答案是北京。", ["北京", "北京市"]) == 1.0
    assert score("qa", "上海", ["北京"]) == 0.0


def test_right_label_whatever_case_and_words_around_it():
    for right in ("positive", "POSITIVE.", "The label is Positive", "I would say: positive!", "\\boxed{positive}"):
        assert score("classification", right, "positive") == 1.0, right
    for wrong in ("negative", "", "positively", "\\boxed{negative} not positive"):
        assert score("classification", wrong, "positive") == 0.0, wrong
    assert score("classification", "It is card arrival.", "card_arrival") == 1.0


def test_known_labels_make_naming_several_wrong():
    labels = {"labels": ["spam", "not spam"]}
    assert score("classification", "not spam", "spam", labels) == 0.0
    assert score("classification", "This is not spam.", "not spam", labels) == 1.0
    assert score("classification", "spam or maybe not spam", "spam", labels) == 0.0
    assert score_by_source("classification", "unsure", "spam", labels) == {"score": 0.0, "pred": ""}


def test_pred_is_equal_for_equal_answers():
    preds = {score_by_source("math", text, "5")["pred"] for text in ("\\boxed{0.50}", "#### 1/2", "\\boxed{\\frac12}")}
    assert preds == {"0.5"}
    assert score_by_source("gsm8k", "I do not know", "5")["pred"] == ""


def test_hub_names_of_data_sets_find_their_scorer():
    for source in ("openai/gsm8k", "lighteval/MATH", "HuggingFaceH4/MATH-500", "DigitalLearningGmbH/MATH-lighteval"):
        assert score(source, "#### 42", "42") == 1.0


def test_unknown_sources_are_listed_together_with_the_nearest_known_one():
    check_sources(known_sources())
    with pytest.raises(RewardError, match=r"'gsm8'.*'mine'") as caught:
        check_sources(["gsm8", "qa", "mine"])
    assert "did you mean 'gsm8k'?" in str(caught.value)


def test_a_scorer_is_added_by_an_entry_in_the_registry(monkeypatch):
    monkeypatch.setitem(SCORERS, "length", lambda solution, truth, extra: float(len(solution)))
    assert score_by_source("length", "four", None) == 4.0


LONG = 400_000
HOSTILE = {
    "a number in whitespace": lambda: answers.extract_final_answer(" " * LONG),
    "a fence that ends in whitespace": lambda: extract_program("```" + " " * LONG + "x"),
    "answer tags left open": lambda: answers.explicit_answer("<answer>" * (LONG // 8)),
    "program tags left open": lambda: extract_program("<answer>" * (LONG // 8)),
    "formulas left open": lambda: answers.final_expression("because of this " + "\\(" * LONG),
    "an answer in whitespace": lambda: score("gsm8k", "#### answer" + " " * LONG, "5"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_costs_quadratic_time(name):
    """Quadratic would be minutes; what takes so long is interrupted, by the processor's time and not by the clock."""

    def interrupt(*_):
        raise AssertionError("this grows with the square of the text's length")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, 20.0)
    try:
        HOSTILE[name]()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_last_answer_tags_count_and_open_ones_are_passed_over():
    assert answers.explicit_answer("<answer>1</answer> no: <ANSWER> 2 </answer> <answer>3") == "2"
    assert answers.explicit_answer("</answer> 7 <answer>") is None
    assert answers.extract_final_answer("put it into <answer> tags: <answer>42</answer>") == "42"
    assert extract_program("<answer>x = 1</answer>") == "x = 1"


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ({1, 2, 3}, [1, 1, 2], False),
        ({1, 2, 3}, [3, 1, 2], True),
        ({1.0, 2}, [2, 1], True),
        (frozenset({"a", "b"}), ["a", "a"], False),
        ({(1, 2), (3, 4)}, [[3, 4], [1, 2]], True),
        ({(1, 2), (3, 4)}, [[1, 2], [1, 2]], False),
        (set(), [], True),
    ],
)
def test_a_set_has_every_expected_member_once(got, expected, same):
    from posttrain.rewards.scorers.code import same_value

    assert same_value(got, expected) is same
