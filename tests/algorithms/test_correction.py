"""Importance weights between rollout and trainer, and what is reported about them."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.algorithms import AlgorithmError, call_policy_loss, compute_rollout_correction


def config(level: str | None, threshold: float = 1.5) -> dict:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def gaps(batch) -> list[list[float]]:
    """Log-ratios of the written tokens, row by row."""
    gap = batch.old_log_prob - batch.rollout_log_prob
    return [row[m.bool()].tolist() for row, m in zip(gap, batch.mask, strict=True)]


def plain_weights(batch, level: str, threshold: float) -> torch.Tensor:
    gap = batch.old_log_prob - batch.rollout_log_prob
    expected = torch.zeros_like(gap)
    for row in range(16):
        for t in range(7):
            if batch.mask[row, t]:
                log = gap[row, t].item() if level == "token" else math.fsum(gaps(batch)[row])
                expected[row, t] = min(math.exp(log), threshold)
    return expected


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_weights_equal_the_plain_formula(ragged, level):
    weights, _ = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config(level))
    assert weights is not None
    assert torch.allclose(weights.double(), plain_weights(ragged, level, 1.5), atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_are_divided_by_the_mean_over_tokens_or_responses(ragged, level):
    chosen = {**config(level), "rollout_is_batch_normalize": True}
    weights, metrics = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, chosen)
    plain = plain_weights(ragged, level, 1.5)
    rows = [row[m.bool()] for row, m in zip(plain, ragged.mask, strict=True) if m.any()]
    mean = float(torch.cat(rows).mean() if level == "token" else torch.stack([row[0] for row in rows]).mean())
    assert weights is not None and metrics["rollout_is/norm"] == pytest.approx(mean, rel=1e-6) != 1
    assert torch.allclose(weights.double(), plain / mean, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_diagnostics_equal_their_plain_formulas(ragged, level):
    _, metrics = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config(level))
    rows = [row for row in gaps(ragged) if row]
    logs = [x for row in rows for x in row] if level == "token" else [math.fsum(row) for row in rows]
    ratios = [math.exp(x) for x in logs]
    kept = [min(r, 1.5) for r in ratios]
    tokens = [x for row in rows for x in row]
    assert metrics == {
        "rollout_is/mean": pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-6),
        "rollout_is/max": pytest.approx(max(ratios), rel=1e-6),
        "rollout_is/truncated": pytest.approx(sum(r > 1.5 for r in ratios) / len(ratios)),
        "rollout_is/ess": pytest.approx(math.fsum(kept) ** 2 / (len(kept) * math.fsum(k * k for k in kept)), rel=1e-6),
        "mismatch/kl": pytest.approx(-math.fsum(tokens) / len(tokens)),
        "mismatch/k3_kl": pytest.approx(math.fsum(math.exp(x) - x - 1 for x in tokens) / len(tokens)),
        "mismatch/logp_max": pytest.approx(max(map(abs, tokens))),
        "mismatch/ppl_ratio": pytest.approx(
            math.exp(-math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows))
        ),
    }
    assert 0 < metrics["rollout_is/truncated"] < 1


def test_switching_them_on_changes_the_loss_of_an_off_policy_batch(ragged):
    def loss(level: str | None) -> torch.Tensor:
        weights, _ = compute_rollout_correction(
            ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask, config(level)
        )
        return call_policy_loss(
            "vanilla",
            old_log_prob=ragged.old_log_prob,
            log_prob=ragged.log_prob,
            advantages=ragged.advantages,
            response_mask=ragged.mask,
            rollout_is_weights=weights,
        ).loss

    off = loss(None)
    for level in ("token", "sequence"):
        assert torch.allclose(loss(level), off * plain_weights(ragged, level, 1.5), atol=1e-5)
        assert not torch.allclose(loss(level), off, atol=1e-2)


def test_off_gives_no_weights_and_still_reports_the_mismatch(ragged):
    weights, metrics = compute_rollout_correction(ragged.old_log_prob, ragged.rollout_log_prob, ragged.mask)
    assert weights is None
    assert set(metrics) == {"mismatch/kl", "mismatch/k3_kl", "mismatch/logp_max", "mismatch/ppl_ratio"}


def test_equal_policies_have_weight_1_full_sample_size_and_no_mismatch(ragged):
    weights, metrics = compute_rollout_correction(
        ragged.old_log_prob, ragged.old_log_prob.clone(), ragged.mask, config("sequence", 2.0)
    )
    assert weights is not None
    assert torch.equal(weights, ragged.mask.to(weights.dtype))
    assert metrics["rollout_is/ess"] == 1.0
    assert metrics["mismatch/k3_kl"] == metrics["mismatch/logp_max"] == 0.0


def test_weights_carry_no_gradient_and_survive_extremes_and_garbage():
    old = torch.tensor([[-1.0, 500.0, float("nan")], [0.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    for level in ("token", "sequence"):
        weights, metrics = compute_rollout_correction(old, torch.zeros(2, 3), mask, config(level))
        assert weights is not None
        assert not weights.requires_grad
        assert torch.isfinite(weights).all()
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(("wrong", "text"), [(config("tokens"), "`token`"), (config("token", 0.0), "threshold")])
def test_wrong_settings_are_named(wrong, text):
    with pytest.raises(AlgorithmError, match=text):
        compute_rollout_correction(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), wrong)
