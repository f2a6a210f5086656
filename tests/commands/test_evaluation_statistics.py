"""pass@k, maj@k, intervals and the paired test against plain formulas and enumeration."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from posttrain.commands.evaluation.scoring import (
    EXACT_UP_TO,
    ScoredPrompt,
    bootstrap,
    estimate,
    majority_at_k,
    per_prompt,
    sign_flip_p,
    summary,
    wilson,
)
from posttrain.tracking.metrics import answer_of, majority_row, pass_at_k


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        flags = [1] * right + [0] * (n - right)
        draws = list(itertools.combinations(flags, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def by_enumeration(answers, right, k):
    """The vote of every ordered draw, by the rule of validation: of equals the answer given first."""
    draws = list(itertools.permutations(range(len(answers)), k))
    return sum(right[draw[majority_row([answers[row] for row in draw])]] for draw in draws) / len(draws)


CASES = [
    (["a", "a", "b"], [1, 1, 0]),
    (["a", "b"], [1, 0]),
    (["a", "b", "c", None], [0, 1, 0, 0]),
    ([None, None, None], [0, 1, 0]),
    (["a", "a", "b", "b", None], [1, 1, 0, 0, 1]),
    (["a", "a", "a"], [1, 0, 1]),
]


@pytest.mark.parametrize(("answers", "right"), CASES)
def test_maj_at_k_is_the_mean_over_all_ordered_draws(answers, right):
    for k in range(1, len(answers) + 1):
        assert majority_at_k(answers, right, k) == pytest.approx(by_enumeration(answers, right, k)), k


def test_maj_at_k_agrees_with_enumeration_on_random_votes():
    draw = random.Random(3)
    for _ in range(25):
        n = draw.randint(1, 6)
        answers = [draw.choice(["a", "b", "c", None]) for _ in range(n)]
        right = [draw.randint(0, 1) for _ in range(n)]
        k = draw.randint(1, n)
        assert majority_at_k(answers, right, k) == pytest.approx(by_enumeration(answers, right, k)), (answers, right, k)


def test_maj_at_k_of_one_is_the_accuracy_and_large_groups_are_quick():
    draw = random.Random(1)
    answers = [draw.choice("abcdefgh") for _ in range(64)]
    right = [float(answer == "a") for answer in answers]
    assert majority_at_k(answers, right, 1) == pytest.approx(sum(right) / 64)
    assert 0.0 <= majority_at_k(answers, right, 32) <= 1.0
    most = max(answers.count(answer) for answer in set(answers))
    tied = [answer for answer in set(answers) if answers.count(answer) == most]
    assert majority_at_k(answers, right, 64) == pytest.approx(("a" in tied) / len(tied))


def test_a_reward_that_read_no_answer_does_not_vote():
    assert answer_of({"pred": ""}) is None and answer_of({}) is None and answer_of({"answer": 4}) == "4"


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(0, 10, 0.0, 0.27753), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0), (81, 263, 0.25527, 0.36621)],
)
def test_wilsons_interval_has_its_published_values(right, total, low, high):
    assert wilson(right, total) == (pytest.approx(low, abs=2e-5), pytest.approx(high, abs=2e-5))


def test_the_bootstrap_is_fixed_resamples_prompts_and_has_the_width_of_the_normal_interval():
    assert bootstrap([0.0, 1.0]) == (0.0, 1.0)  # means 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    values = np.random.default_rng(0).random(400)
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(list(values))
    half = 1.96 * values.std() / math.sqrt(400)
    assert (high - low) / 2 == pytest.approx(half, rel=0.05)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=0.1 * half)


def test_responses_to_one_prompt_are_one_unit():
    """40 prompts that are always or never solved: eight responses to each say no more than one."""
    found = []
    for n in (1, 8):
        prompts = [scored([float(row % 2)] * n) for row in range(40)]
        found.append(summary(prompts, per_prompt(prompts))["sums"]["metrics"]["accuracy"])
    assert found[0] == found[1] and found[0]["high"] - found[0]["low"] > 0.28


def scored(scores: list[float], source: str = "sums", **more) -> ScoredPrompt:
    count = len(scores)
    empty = {"parts": [{}] * count, "errors": [None] * count, "finish_reasons": ["stop"] * count, "tokens": [3] * count}
    fixed = {"messages": "q", "prompt": "q", "data_source": source, "ground_truth": "1", "responses": ["r"] * count}
    return ScoredPrompt(**{**fixed, **empty, "scores": scores, **more})


def test_numbers_per_data_source_and_over_all():
    prompts = [
        scored([1.0, 0.0], parts=[{"pred": "1"}, {"pred": "2"}], finish_reasons=["stop", "length"], tokens=[2, 4]),
        scored([0.2, 0.4], "others", parts=[{"acc": 1.0, "pred": ""}, {"acc": 0.0}], errors=["broke", None]),
    ]
    found = summary(prompts, per_prompt(prompts))
    assert list(found) == ["sums", "others", "all"]
    values = {name: {m: e["value"] for m, e in entry["metrics"].items()} for name, entry in found.items()}
    assert values["sums"] == {"reward": 0.5, "accuracy": 0.5, "pass@2": 1.0, "maj@2": 0.5}
    assert values["others"] == {"reward": pytest.approx(0.3), "accuracy": 0.5, "pass@2": 1.0, "maj@2": 0.5}
    assert values["all"]["reward"] == pytest.approx(0.4)
    assert (found["sums"]["truncated"], found["sums"]["mean_length"], found["sums"]["without_answer"]) == (
        0.5,
        3.0,
        0.0,
    )
    assert (found["others"]["reward_failures"], found["others"]["without_answer"], found["all"]["prompts"]) == (
        1,
        1.0,
        2,
    )


def test_which_interval_is_used_is_stated():
    assert estimate([1.0, 0.0, 1.0]).method == "wilson"
    assert estimate([0.5, 0.0, 1.0]).method == "bootstrap"
    assert estimate([0.0] * 12).high == pytest.approx(0.2425, abs=1e-3)  # not a width of 0
    alone = estimate([0.3])
    assert (alone.value, alone.low, alone.high, alone.method) == (0.3, None, None, "none")


def mcnemar(better: int, worse: int) -> float:
    total = better + worse
    tail = sum(math.comb(total, i) for i in range(max(better, worse), total + 1)) / 2**total
    return min(1.0, 2 * tail)


@pytest.mark.parametrize(("better", "worse"), [(0, 1), (5, 0), (7, 2), (4, 4), (10, 3)])
def test_for_right_and_wrong_the_sign_flip_test_is_mcnemars_exact_test(better, worse):
    differences = [1.0] * better + [-1.0] * worse + [0.0] * 20
    assert sign_flip_p(differences) == pytest.approx(mcnemar(better, worse))


def test_the_sign_flip_test_enumerates_signs_and_samples_them_for_many_prompts():
    draw = random.Random(2)
    differences = [draw.uniform(-1, 1.5) for _ in range(8)]
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=8)
    ]
    wanted = sum(flip >= abs(sum(differences)) - 1e-9 for flip in flips) / len(flips)
    assert sign_flip_p(differences) == pytest.approx(wanted)
    many = [1.0] * 60 + [-1.0] * 40
    assert len(many) > EXACT_UP_TO and sign_flip_p(many) == pytest.approx(mcnemar(60, 40), abs=0.01)
    assert sign_flip_p([0.0, 0.0]) == 1.0 and sign_flip_p([1.0] * 200) < 2e-4
