"""Scores by verl's rules. (These hold for verl 0.9.1 as well, but for sources that only posttrain scores.)"""

import subprocess
import sys

import pytest

from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward, search_r1_like_qa_em

CASES = [
    ("openai/gsm8k", "so\n#### 1,234", "1234", 1.0),
    ("openai/gsm8k", "#### 12 #### 13", "13", 1.0),
    ("openai/gsm8k", "The answer is 1234", "1234", 0.0),
    ("openai/gsm8k", "#### 1234.0", "1234", 0.0),
    ("lighteval/MATH", r"thus \boxed{\frac{1}{2}}", r"\frac12", 1.0),
    ("lighteval/MATH", r"\boxed{3} and \boxed{x=5}", "5", 1.0),
    ("lighteval/MATH", r"\boxed{5\text{ cm}}", "5", 1.0),
    ("lighteval/MATH", "5", "5", 0.0),
    ("HuggingFaceH4/MATH-500", r"$\boxed 7$", "7", 1.0),
    ("HuggingFaceH4/MATH-500", r"\boxed{\{1,2\}}", r"\{1,2\}", 1.0),
    ("searchR1_nq", "<answer>The Eiffel Tower.</answer>", {"target": ["eiffel tower"]}, 1.0),
    ("searchR1_nq", "<answer>in Paris</answer>", {"target": ["paris"]}, 0.0),
    ("searchR1_nq", "Paris", {"target": ["paris"]}, 0.0),
]


@pytest.mark.parametrize(("source", "response", "truth", "score"), CASES)
def test_responses_score_as_in_verl(source, response, truth, score):
    assert default_compute_score(source, response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score", "pred"),
    [
        ("Answer: 42", "42", 1.0, "42"),
        ("Answer: 3\nAnswer: $1,234$", "1234", 1.0, "1234"),
        ("Answer: 12 dollars", "12", 1.0, "12"),
        (r"Answer: \text{10} degrees", "10", 1.0, "10"),
        ("Answer: 41", "42", -1.0, "41"),
        (r"hence \boxed{42}", "42", 1.0, "42"),
        ("42", "42", -1.0, "[INVALID]"),
    ],
)
def test_dapos_rule(response, truth, score, pred):
    found = default_compute_score("math_dapo", response, truth)
    assert (found["score"], found["acc"], found["pred"]) == (score, score == 1.0, pred)


def test_the_parts_of_the_scores_have_their_names():
    assert gsm8k.extract_solution("a 5 then 6.") == None  # noqa: E711
    assert gsm8k.extract_solution("a 5 then 6", method="flexible") == "6"
    assert gsm8k.compute_score("#### 5", "6", format_score=0.1) == 0.1
    assert gsm8k.compute_score("5", "5", format_score=0.1) == 0
    assert math_reward.last_boxed_only_string(r"a \boxed{b{c}} d") == r"\boxed{b{c}}"
    assert math_reward.remove_boxed(r"\boxed{b{c}}") == "b{c}"
    assert math_dapo.is_correct_strict_box(r"\boxed{4}", "4") == (1, "4")
    assert search_r1_like_qa_em.em_check("The cat", ["a cat"]) == 1
    assert search_r1_like_qa_em.subem_check("The cat sat", "cat") == 1


# of posttrain:


def test_sources_that_verl_does_not_know_are_scored_by_posttrain():
    assert default_compute_score("math_reasoning", "the answer is 42", "42")["score"] == 1.0
    with pytest.raises(NotImplementedError, match="poems"):
        default_compute_score("poems", "a", "b")


def test_reward_files_load_no_torch():
    code = "import verl.utils.reward_score.gsm8k, sys; print([m for m in ('torch', 'tensordict') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
