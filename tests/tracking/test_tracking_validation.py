"""mean@k, pass@k and maj@k per data source."""

from __future__ import annotations

from itertools import combinations

import pytest

from posttrain.tracking.metrics import majority_row, pass_at_k, validation_metrics


@pytest.mark.parametrize(("n", "right"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 6), (7, 3)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(n, right):
    answers = [True] * right + [False] * (n - right)
    for k in range(1, n + 1):
        draws = list(combinations(answers, k))
        assert pass_at_k(n, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_needs_k_responses():
    with pytest.raises(ValueError, match="pass@3 needs at least 3 responses; there are 2"):
        pass_at_k(2, 1, 3)


def test_majority_is_of_answers_and_the_first_of_equals():
    assert majority_row(["1", "2", "2", None, None, None]) == 1
    assert majority_row(["2", "1", "1", "2"]) == 0
    assert majority_row([None, None]) == 0


def test_metrics_per_data_source():
    metrics = validation_metrics(
        data_sources=["sums"] * 8 + ["openai/gsm8k"] * 2,
        uids=["a", "a", "a", "a", "b", "b", "b", "b", "c", "d"],
        scores=[1, 0, 1, 0, 0, 0, 0, 1, 1, 0],
        parts=[{"pred": p, "acc": a} for p, a in zip("1213522955", [1, 0, 1, 0, 0, 0, 0, 1, 1, 0], strict=True)],
    )
    assert next(iter(metrics)) == "val/sums/mean@4"
    assert metrics["val/sums/mean@4"] == pytest.approx(3 / 8)
    assert metrics["val/sums/std@4"] == pytest.approx(((1 / 3) ** 0.5 + 0.5) / 2)
    assert metrics["val/sums/pass@1"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert metrics["val/sums/pass@2"] == pytest.approx((1 - 1 / 6 + 1 - 3 / 6) / 2)
    assert metrics["val/sums/pass@4"] == 1.0
    assert metrics["val/sums/maj@4"] == 0.5  # "1" is right for a, "2" is wrong for b
    assert metrics["val/sums/acc/mean@4"] == pytest.approx(3 / 8)
    assert metrics["val/openai/gsm8k/mean@1"] == 0.5 and "val/openai/gsm8k/maj@1" not in metrics


def test_no_majority_without_answers():
    metrics = validation_metrics(data_sources=["s"] * 2, uids=[0, 0], scores=[1, 0])
    assert set(metrics) == {"val/s/mean@2", "val/s/std@2", "val/s/pass@1", "val/s/pass@2"}
    assert (
        validation_metrics(data_sources=["s"] * 2, uids=[0, 0], scores=[1, 0], answers=["x", "y"])["val/s/maj@2"] == 1.0
    )
