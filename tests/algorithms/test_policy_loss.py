"""The clipped policy loss and the critic's, per token, against plain formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithms import AlgorithmError, compute_policy_loss_vanilla, compute_value_loss


def settings(**changed) -> SimpleNamespace:
    base = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    return SimpleNamespace(**{**base, **changed})


def one_token(ratio: float, advantage: float, **changed) -> float:
    log_prob = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    losses, _ = compute_policy_loss_vanilla(
        torch.zeros_like(log_prob),
        log_prob,
        torch.full_like(log_prob, advantage),
        torch.ones(1, 1),
        settings(**changed),
    )
    return losses.item()


def plain(ratio: float, a: float, low: float, high: float, c: float) -> float:
    loss = max(-a * ratio, -a * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -a * c) if a < 0 else loss


def test_ratio_1_5_is_clipped_above_for_good_tokens_and_not_for_bad_ones():
    assert one_token(1.5, +1) == pytest.approx(-1.2)
    assert one_token(1.5, -1) == pytest.approx(+1.5)
    assert one_token(1.5, +1, clip_ratio=0.3) == pytest.approx(-1.3)


def test_lower_and_upper_clip_are_separate():
    assert one_token(1.5, +1, clip_ratio_high=0.28) == pytest.approx(-1.28)
    assert one_token(0.5, -1, clip_ratio_low=0.4) == pytest.approx(0.6)
    assert one_token(0.5, -1, clip_ratio_high=0.28) == pytest.approx(0.8)


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    assert one_token(50.0, -2) == pytest.approx(6.0)
    assert one_token(50.0, -2, clip_ratio_c=5.0) == pytest.approx(10.0)
    assert one_token(50.0, +2) == pytest.approx(-2.4)


def test_every_token_equals_the_plain_formula(ragged):
    config = settings(clip_ratio_low=0.15, clip_ratio_high=0.3, clip_ratio_c=1.5)
    losses, metrics = compute_policy_loss_vanilla(
        ragged.old_log_prob, ragged.log_prob, ragged.advantages, ragged.mask, config
    )
    seen = {"clip": 0, "dual": 0}
    for row in range(16):
        for t in range(7):
            if not ragged.mask[row, t]:
                assert losses[row, t] == 0
                assert all(values[row, t] == 0 for values in metrics.values())
                continue
            log_ratio = (ragged.log_prob - ragged.old_log_prob)[row, t].item()
            ratio, a = math.exp(log_ratio), ragged.advantages[row, t].item()
            assert losses[row, t].item() == pytest.approx(plain(ratio, a, 0.15, 0.3, 1.5), abs=1e-12)
            clipped = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.85)
            dual = a < 0 and ratio > 1.5
            assert metrics["actor/pg_clipfrac"][row, t].item() == float(clipped)
            assert metrics["actor/pg_clipfrac_lower"][row, t].item() == float(dual)
            assert metrics["actor/ppo_kl"][row, t].item() == pytest.approx(-log_ratio, abs=1e-12)
            seen["clip"] += clipped
            seen["dual"] += dual
    assert min(seen.values()) >= 3, "the batch must reach every branch"


def test_on_policy_the_loss_is_minus_the_advantage_and_its_gradient_too(ragged):
    log_prob = ragged.log_prob.clone().requires_grad_()
    losses, metrics = compute_policy_loss_vanilla(
        log_prob.detach(), log_prob, ragged.advantages, ragged.mask, settings()
    )
    losses.sum().backward()
    expected = -ragged.advantages * ragged.mask
    assert torch.equal(losses.detach(), expected)
    assert torch.allclose(log_prob.grad, expected, atol=1e-15)
    assert not metrics["actor/pg_clipfrac"].any()


@pytest.mark.parametrize("gap", [200.0, -200.0, 1e6, -1e6])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_ratios_give_finite_losses_and_gradients(gap, advantage, dtype):
    log_prob = torch.full((1, 2), gap, dtype=dtype, requires_grad=True)
    losses, _ = compute_policy_loss_vanilla(
        torch.zeros_like(log_prob), log_prob, torch.full_like(log_prob, advantage), torch.ones(1, 2), settings()
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert torch.isfinite(log_prob.grad).all()


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient():
    log_prob = torch.tensor([[-1.0, float("nan"), float("-inf")]], requires_grad=True)
    mask = torch.tensor([[1, 0, 0]])
    advantages = torch.tensor([[1.0, float("nan"), 1.0]])
    losses, _ = compute_policy_loss_vanilla(torch.full((1, 3), -1.0), log_prob, advantages, mask, settings())
    losses.sum().backward()
    assert losses.tolist() == [[-1.0, 0.0, 0.0]]
    assert log_prob.grad.tolist() == [[-1.0, 0.0, 0.0]]


def test_policy_loss_gradient_passes_gradcheck(ragged):
    def loss(log_prob):
        return compute_policy_loss_vanilla(ragged.old_log_prob, log_prob, ragged.advantages, ragged.mask, settings())[0]

    assert torch.autograd.gradcheck(loss, ragged.log_prob.clone().requires_grad_())


def test_importance_weights_multiply_the_losses_and_carry_no_gradient(ragged):
    weights = torch.rand(16, 7, dtype=torch.float64).requires_grad_()
    log_prob = ragged.log_prob.clone().requires_grad_()
    arguments = (ragged.old_log_prob, log_prob, ragged.advantages, ragged.mask, settings())
    weighted, _ = compute_policy_loss_vanilla(*arguments, rollout_is_weights=weights)
    bare, _ = compute_policy_loss_vanilla(*arguments)
    assert torch.allclose(weighted, weights.detach() * bare)
    weighted.sum().backward()
    assert weights.grad is None


@pytest.mark.parametrize("wrong", [{"clip_ratio_c": 1.0}, {"clip_ratio": -0.1}, {"clip_ratio_low": 1.1}])
def test_impossible_clip_ranges_are_named(wrong):
    with pytest.raises(AlgorithmError, match="clip_ratio"):
        one_token(1.0, 1.0, **wrong)


def test_a_value_that_moved_by_more_than_the_range_gets_the_clipped_loss():
    values, returns = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64)
    vpreds = torch.tensor([[0.1, 0.5, -0.5, 0.5]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0]])
    losses, metrics = compute_value_loss(vpreds, values, returns, mask, cliprange_value=0.2)
    assert losses.tolist()[0] == pytest.approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2, 0])
    assert metrics["critic/vf_clipfrac"].tolist() == [[0, 1, 0, 0]]


def test_value_loss_equals_the_plain_formula_and_passes_gradcheck(ragged):
    def loss(vpreds):
        return compute_value_loss(vpreds, ragged.values, ragged.returns, ragged.mask, cliprange_value=0.2)[0]

    vpreds = (ragged.values + 0.5 * ragged.losses).requires_grad_()
    for row in range(16):
        for t in range(7):
            v, old, r = (x[row, t].item() for x in (vpreds, ragged.values, ragged.returns))
            near = min(max(v, old - 0.2), old + 0.2)
            expected = 0.5 * max((v - r) ** 2, (near - r) ** 2) * ragged.mask[row, t].item()
            assert loss(vpreds)[row, t].item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(loss, vpreds)


def test_value_loss_refuses_a_range_of_0():
    with pytest.raises(AlgorithmError, match="cliprange_value"):
        compute_value_loss(*(torch.zeros(1, 1),) * 3, cliprange_value=0.0)
