"""KL estimates, KL in the reward and the controllers of its coefficient."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithms import (
    KL_TYPES,
    AdaptiveKLController,
    AlgorithmError,
    FixedKLController,
    apply_kl_in_reward,
    compute_kl_divergence,
    get_kl_controller,
    kl_penalty,
)

PLAIN = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "low_var_kl": lambda d: math.exp(-d) + d - 1,
    "k3": lambda d: math.exp(-d) + d - 1,
}
ALL = [name + plus for name in PLAIN for plus in ("", "+")]


def at(d: float, kl_type: str) -> float:
    return kl_penalty(torch.tensor([d - 1.0], dtype=torch.float64), torch.tensor([-1.0], dtype=torch.float64), kl_type)[
        0
    ].item()


def test_the_plain_formulas_cover_every_type():
    assert set(PLAIN) == set(KL_TYPES)


@pytest.mark.parametrize("kl_type", ALL)
def test_every_type_equals_its_plain_formula(ragged, kl_type):
    result = kl_penalty(ragged.log_prob, ragged.ref_log_prob, kl_type)
    d = (ragged.log_prob - ragged.ref_log_prob).tolist()
    expected = [[PLAIN[kl_type.removesuffix("+")](x) for x in row] for row in d]
    assert torch.allclose(result, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("name", ["kl", "k1"])
def test_k1_is_the_difference(name):
    assert at(0.1, name) == pytest.approx(0.1)


def test_abs_is_the_distance():
    assert at(-0.1, "abs") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "value"), [("mse", 0.005), ("k2", 0.005), ("low_var_kl", 0.0048374), ("k3", 0.0048374)]
)
def test_k2_and_k3_at_0_1(name, value):
    assert at(0.1, name) == pytest.approx(value, abs=1e-7)


def test_a_name_that_is_not_offered_lists_the_known_ones():
    with pytest.raises(AlgorithmError, match=r"`full`.*abs.*k1.*k2.*k3.*kl.*low_var_kl.*mse"):
        at(0.1, "full")


@pytest.mark.parametrize("name", list(PLAIN))
def test_plus_keeps_the_value_and_has_the_gradient_of_k2(ragged, name):
    with_plus, as_k2 = (ragged.log_prob.clone().requires_grad_() for _ in range(2))
    value = kl_penalty(with_plus, ragged.ref_log_prob, name + "+")
    assert torch.equal(value, kl_penalty(ragged.log_prob, ragged.ref_log_prob, name))
    value.sum().backward()
    kl_penalty(as_k2, ragged.ref_log_prob, "k2").sum().backward()
    assert torch.equal(with_plus.grad, as_k2.grad)
    assert torch.allclose(with_plus.grad, ragged.log_prob - ragged.ref_log_prob)


@pytest.mark.parametrize("name", list(PLAIN))
def test_gradients_pass_gradcheck(ragged, name):
    log_prob = ragged.log_prob.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ragged.ref_log_prob, name), log_prob)


@pytest.mark.parametrize("kl_type", ALL)
@pytest.mark.parametrize("gap", [500.0, -500.0])
def test_extreme_gaps_stay_finite_in_float32(kl_type, gap):
    log_prob = torch.full((1, 1), gap, requires_grad=True)
    value = kl_penalty(log_prob, torch.zeros(1, 1), kl_type)
    if value.requires_grad:
        value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(log_prob.grad).all()


def test_k3_of_tiny_gaps_is_not_lost_to_rounding_in_float32():
    value = kl_penalty(torch.tensor([1e-4]), torch.tensor([0.0]), "k3")
    assert value.item() == pytest.approx(5e-9, rel=0.2)
    assert value.item() >= 0


@pytest.mark.parametrize("kl_type", ALL)
def test_compute_kl_divergence_equals_kl_penalty(ragged, kl_type):
    ours = compute_kl_divergence(ragged.log_prob, ragged.ref_log_prob, type=kl_type)
    assert torch.equal(ours, kl_penalty(ragged.log_prob, ragged.ref_log_prob, kl_type))


def test_rewards_differ_from_scores_by_coefficient_times_kl(ragged):
    rewards, metrics = apply_kl_in_reward(
        ragged.rewards, ragged.old_log_prob, ragged.ref_log_prob, ragged.mask, FixedKLController(0.02), "kl"
    )
    kl = (ragged.old_log_prob - ragged.ref_log_prob) * ragged.mask
    assert torch.allclose(ragged.rewards - rewards, 0.02 * kl, atol=1e-15)
    rows = [row[m.bool()].mean().item() for row, m in zip(kl, ragged.mask, strict=True) if m.any()]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(math.fsum(rows) / len(rows))
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.02


def kl_ctrl(**changed) -> SimpleNamespace:
    return SimpleNamespace(**{"type": "adaptive", "kl_coef": 0.02, "target_kl": 0.01, "horizon": 1000, **changed})


def test_adaptive_coefficient_rises_above_the_target_and_falls_below_and_fixed_stays():
    up, down, fixed = (get_kl_controller(kl_ctrl(**c)) for c in ({}, {}, {"type": "fixed"}))
    up.update(0.5, n_steps=100)
    down.update(0.001, n_steps=100)
    fixed.update(0.5, n_steps=100)
    assert up.value == pytest.approx(0.02 * 1.02)
    assert down.value == pytest.approx(0.02 * 0.98)
    assert fixed.value == 0.02


def test_the_first_batch_is_charged_and_logged_with_kl_coef_itself(ragged):
    controller = get_kl_controller(kl_ctrl())
    arguments = (ragged.rewards, ragged.log_prob, ragged.ref_log_prob, ragged.mask, controller, "k2")
    _, first = apply_kl_in_reward(*arguments)
    _, second = apply_kl_in_reward(*arguments)
    assert first["actor/reward_kl_penalty_coeff"] == 0.02
    assert second["actor/reward_kl_penalty_coeff"] == controller.value / (1 + 0.2 * 14 / 1000)


def test_the_adaptation_turns_at_the_target_and_the_horizon_has_a_default():
    controller = get_kl_controller({"type": "adaptive", "kl_coef": 0.02, "target_kl": 0.01})
    assert isinstance(controller, AdaptiveKLController)
    assert controller.horizon == 10000
    controller.update(0.01, n_steps=5000)
    assert controller.value == pytest.approx(0.02)
    for kl, sign in ((0.0101, 1), (0.0099, -1)):
        before = controller.value
        controller.update(kl, n_steps=5000)
        assert (controller.value - before) * sign > 0


def test_a_batch_far_longer_than_the_horizon_never_makes_the_coefficient_negative():
    controller = AdaptiveKLController(0.02, target_kl=0.1, horizon=10)
    controller.update(0.0, n_steps=10_000)
    assert controller.value == pytest.approx(0.016)


def test_controller_state_comes_back_after_resume():
    first, second = get_kl_controller(kl_ctrl()), get_kl_controller(kl_ctrl())
    first.update(0.5, n_steps=100)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value != 0.02


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"type": "adaptiv"}, "adaptive"), ({"target_kl": 0}, "target_kl"), ({"horizon": 0}, "horizon")],
)
def test_wrong_controllers_are_named(changed, text):
    with pytest.raises(AlgorithmError, match=text):
        get_kl_controller(kl_ctrl(**changed))
