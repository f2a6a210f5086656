"""GAE against the plain recursion over the tokens that the policy wrote."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from posttrain.algorithms import AlgorithmError, compute_advantage, compute_gae_advantage_return


def plain_row(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float):
    """Advantages and returns of one row: the recursion over its written tokens only."""
    written = [t for t, m in enumerate(mask) if m]
    claimed = dict.fromkeys(written, 0.0)
    for t, reward in enumerate(rewards):
        owners = [w for w in written if w <= t]
        if owners:
            claimed[owners[-1]] += reward
    advantages, returns, following, next_value = [0.0] * len(mask), [0.0] * len(mask), 0.0, 0.0
    for t in reversed(written):
        following = claimed[t] + gamma * next_value - values[t] + gamma * lam * following
        advantages[t], returns[t], next_value = following, following + values[t], values[t]
    return advantages, returns


def plain(batch: SimpleNamespace, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [
        plain_row(r, v, m, gamma, lam)
        for r, v, m in zip(batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist(), strict=True)
    ]
    advantages, returns = zip(*rows, strict=True)
    return torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)


def whiten(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    values = advantages[mask.bool()].tolist()
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return (advantages - mean) / math.sqrt(variance + 1e-8) * mask


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.95), (0.9, 0.7)])
def test_equals_the_plain_recursion_over_ragged_masks(ragged, gamma, lam):
    advantages, returns = compute_gae_advantage_return(ragged.rewards, ragged.values, ragged.mask, gamma, lam)
    expected, expected_returns = plain(ragged, gamma, lam)
    assert torch.allclose(returns, expected_returns, atol=1e-12)
    assert torch.allclose(advantages, whiten(expected, ragged.mask), atol=1e-12)


def test_gamma_discounts_the_return_per_token():
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    zeros = torch.zeros_like(rewards)
    _, returns = compute_gae_advantage_return(rewards, zeros, torch.ones(1, 3), gamma=0.9, lam=1.0)
    assert returns.tolist()[0] == pytest.approx([0.81, 0.9, 1.0])


def test_lam_1_gives_returns_minus_values(ragged):
    advantages, _ = compute_gae_advantage_return(
        ragged.rewards, ragged.values, ragged.mask, gamma=1.0, lam=1.0, whiten=False
    )
    to_go = (ragged.rewards * ragged.mask).flip(-1).cumsum(-1).flip(-1)
    assert torch.allclose(advantages, (to_go - ragged.values) * ragged.mask, atol=1e-12)


def test_settings_gamma_and_lam_reach_the_estimator_by_name(ragged):
    config = SimpleNamespace(gamma=0.8, lam=0.6)
    by_name = compute_advantage(
        "gae", token_level_rewards=ragged.rewards, response_mask=ragged.mask, values=ragged.values, config=config
    )
    direct = compute_gae_advantage_return(ragged.rewards, ragged.values, ragged.mask, 0.8, 0.6)
    in_config = compute_gae_advantage_return(ragged.rewards, ragged.values, ragged.mask, config=config)
    for ours, same, expected in zip(by_name, in_config, direct, strict=True):
        assert torch.equal(ours, expected)
        assert torch.equal(same, expected)


def test_observation_tokens_are_stepped_over_and_their_reward_is_credited_to_the_token_before():
    mask = torch.tensor([[1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 0.5, 0.0, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.2, 9.0, -9.0, 0.4, 9.0]], dtype=torch.float64)
    _, returns = compute_gae_advantage_return(rewards, values, mask, gamma=1.0, lam=0.0)
    assert returns.tolist()[0] == pytest.approx([0.5 + 0.4, 0, 0, 1.0, 0])


def test_whitened_advantages_have_mean_0_and_variance_1(ragged):
    advantages, _ = compute_gae_advantage_return(ragged.rewards, ragged.values, ragged.mask, 1.0, 0.95)
    kept = advantages[ragged.mask.bool()]
    assert kept.mean().item() == pytest.approx(0, abs=1e-12)
    assert kept.var().item() == pytest.approx(1, abs=1e-6)
    assert (advantages[ragged.mask == 0] == 0).all()


@pytest.mark.parametrize("tokens", [0, 1])
def test_batches_of_no_or_one_token_stay_finite(tokens):
    mask = torch.zeros(2, 3)
    mask[0, :tokens] = 1
    advantages, returns = compute_gae_advantage_return(torch.ones(2, 3), torch.ones(2, 3), mask, 1.0, 1.0)
    assert torch.isfinite(advantages).all()
    assert torch.isfinite(returns).all()


def test_gae_without_values_is_an_error_that_says_what_to_do():
    with pytest.raises(AlgorithmError, match=r"values.*critic.*grpo"):
        compute_advantage("gae", token_level_rewards=torch.zeros(2, 3), response_mask=torch.ones(2, 3))


def test_shapes_that_differ_are_named():
    with pytest.raises(AlgorithmError, match=r"\(2, 3\).*\(2, 4\)"):
        compute_gae_advantage_return(torch.zeros(2, 3), torch.zeros(2, 4), torch.ones(2, 3))
