"""Masked importance weights and rejection, against plain formulas; the penalty near the length limit."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import AlgorithmError, compute_rollout_correction, overlong_penalty
from posttrain.algorithms.correction import REJECTIONS
from posttrain.config import choices

K = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}


def plain_kept(batch, rule: str, low: float | None, high: float) -> torch.Tensor:
    level, kind = rule.rsplit("_", 1)
    kept = torch.zeros(16, 7)
    for row in range(16):
        places = [t for t in range(7) if batch.mask[row, t]]
        values = {t: K[kind]((batch.old_log_prob - batch.rollout_log_prob)[row, t].item()) for t in places}
        for t in places:
            total = math.fsum(values.values())
            whole = {"token": values[t], "seq_sum": total, "seq_mean": total / len(places)}
            whole = whole.get(level, max(values.values()))
            number = math.exp(whole) if kind == "k1" else whole
            kept[row, t] = float(number <= high and (low is None or number >= low))
    return kept


@pytest.mark.parametrize("rule", REJECTIONS)
def test_rejection_equals_the_plain_formula(ragged, rule):
    high = {"k1": 1.3, "k2": 0.15, "k3": 0.15}[rule[-2:]] * (3 if "sum" in rule else 1)
    config = {"rollout_rs": rule, "rollout_rs_threshold": f"0.7_{high}" if rule.endswith("k1") else high}
    weights, metrics = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config)
    expected = plain_kept(ragged, rule, 0.7 if rule.endswith("k1") else None, high)
    assert torch.equal(weights, expected)
    tokens = int(ragged.mask.sum())
    assert metrics["rollout_rs/rejected"] == pytest.approx(1 - expected.sum().item() / tokens)
    rows = ragged.mask.bool().any(-1)
    lost = (rows & ~expected.bool().any(-1)).sum().item() / rows.sum().item()
    assert metrics["rollout_rs/rejected_rows"] == pytest.approx(lost)
    assert 0 < metrics["rollout_rs/rejected"] < 1


def test_one_number_for_k1_means_its_inverse_too(ragged):
    arguments = (ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask)
    one, _ = compute_rollout_correction(*arguments, {"rollout_rs": "token_k1", "rollout_rs_threshold": 1.25})
    pair, _ = compute_rollout_correction(*arguments, {"rollout_rs": "token_k1", "rollout_rs_threshold": [0.8, 1.25]})
    assert torch.equal(one, pair)


def test_several_rules_and_weights_multiply(ragged):
    arguments = (ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask)
    both = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_1.5,0.2"}
    weights, metrics = compute_rollout_correction(*arguments, {"rollout_is": "token", **both})
    plain, _ = compute_rollout_correction(*arguments, {"rollout_is": "token"})
    kept = plain_kept(ragged, "token_k1", 0.5, 1.5) * plain_kept(ragged, "seq_mean_k3", None, 0.2)
    assert torch.equal(weights, plain * kept)
    assert {"rollout_rs/token_k1", "rollout_rs/seq_mean_k3"} <= set(metrics)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_range_masks_weights_outside_it_instead_of_truncating(ragged, level):
    config = {"rollout_is": level, "rollout_is_threshold": "0.8_1.5"}
    weights, metrics = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config)
    outside = counted = 0
    for row in range(16):
        gaps = {
            t: (ragged.old_log_prob - ragged.rollout_log_prob)[row, t].item() for t in range(7) if ragged.mask[row, t]
        }
        for t in range(7):
            if t not in gaps:
                assert weights[row, t] == 0
                continue
            ratio = math.exp(gaps[t] if level == "token" else math.fsum(gaps.values()))
            assert weights[row, t].item() == pytest.approx(ratio if 0.8 <= ratio <= 1.5 else 0.0, rel=1e-5)
            if level == "token" or t == min(gaps):
                counted, outside = counted + 1, outside + (not 0.8 <= ratio <= 1.5)
    assert metrics["rollout_is/masked"] == pytest.approx(outside / counted)
    assert "rollout_is/truncated" not in metrics
    assert 0 < metrics["rollout_is/ess"] < 1


def test_the_settings_know_the_rules_that_are_built():
    assert set(choices.REJECTIONS) == set(REJECTIONS)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.0}, "Unknown rejection rule `seq_max_k1`"),
        ({"rollout_rs": "token_k3"}, "one threshold per name"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1,0.2"}, "one threshold per name"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "takes one number"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "low < high"),
        ({"rollout_is": "token", "rollout_is_threshold": "much"}, "number above 0"),
    ],
)
def test_wrong_rules_are_named(ragged, config, text):
    with pytest.raises(AlgorithmError, match=text):
        compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config)


def test_extremes_and_garbage_stay_finite():
    old = torch.tensor([[-1.0, 500.0, float("nan")], [-1e9, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for rule in REJECTIONS:
        config = {"rollout_rs": rule, "rollout_rs_threshold": 2.0}
        weights, metrics = compute_rollout_correction(old, torch.zeros(2, 3), mask, config)
        assert weights is not None and set(weights.flatten().tolist()) <= {0.0, 1.0}
        assert weights[1, 0] == 0  # the token that the trainer finds impossible
        assert all(math.isfinite(value) for value in metrics.values())


def test_the_overlong_penalty_grows_over_the_buffer():
    lengths = torch.tensor([0, 80, 81, 90, 100])
    assert overlong_penalty(lengths, 100, 20, 1.0).tolist() == pytest.approx([0, 0, -0.05, -0.5, -1.0])
    assert overlong_penalty(lengths, 100, 20, 0.5).tolist() == pytest.approx([0, 0, -0.025, -0.25, -0.5])
