"""GRPO's advantage against a plain formula, and its behaviour at the edges."""

from __future__ import annotations

import statistics
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.algorithms import AlgorithmError, compute_advantage, compute_grpo_outcome_advantage


def outcome(scores: list[float], width: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Token-level rewards with each score on the last token."""
    rewards = torch.zeros(len(scores), width, dtype=dtype)
    rewards[:, -1] = torch.tensor(scores, dtype=dtype)
    return rewards


def advantages_of(scores: list[float], index: list, dtype: torch.dtype = torch.float64, **options) -> list[float]:
    rewards = outcome(scores, dtype=dtype)
    result, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=torch.ones_like(rewards), index=np.array(index), **options
    )
    return result[:, 0].tolist()


def plain(scores: list[float], index: list, normalise: bool) -> list[float]:
    """The formula in plain Python, one response at a time, with an exact mean."""
    result = []
    for score, name in zip(scores, index, strict=True):
        group = [s for s, other in zip(scores, index, strict=True) if other == name]
        if len(group) == 1:
            result.append(score)
            continue
        distance = float(Fraction(score) - sum(map(Fraction, group)) / len(group))
        result.append(distance / (statistics.stdev(group) + 1e-6) if normalise else distance)
    return result


UNEQUAL = ["b", "a", "b", "c", "a", "b", "d", "d", "a", "d", "b"]
SCORES = [0.3, -1.0, 2.5, 0.7, 4.0, 0.0, 0.1, 0.1, -0.5, 0.1, 1.0]


def test_one_right_of_five_gives_1_78885_and_minus_0_44721_on_unmasked_tokens_and_0_elsewhere():
    rewards = outcome([1, 0, 0, 0, 0])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]])
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=np.array(["u"] * 5), norm_adv_by_std_in_grpo=True
    )
    expected = torch.tensor([1.78885, -0.44721, -0.44721, -0.44721, -0.44721], dtype=torch.float64)[:, None] * mask
    assert torch.allclose(advantages, expected, atol=1e-5)
    assert (advantages[mask == 0] == 0).all()


@pytest.mark.parametrize(("normalise", "right", "wrong"), [(True, 1.78885, -0.44721), (False, 0.8, -0.2)])
def test_division_by_the_deviation_is_a_setting(normalise, right, wrong):
    expected = pytest.approx([right] + [wrong] * 4, abs=1e-5)
    assert advantages_of([1, 0, 0, 0, 0], ["u"] * 5, norm_adv_by_std_in_grpo=normalise) == expected
    rewards = outcome([1, 0, 0, 0, 0])
    by_name, _ = compute_advantage(
        "grpo",
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=np.array(["u"] * 5),
        config=SimpleNamespace(norm_adv_by_std_in_grpo=normalise),
    )
    assert by_name[:, 0].tolist() == expected


def test_setting_in_config_alone_switches_the_division_off():
    off = {"norm_adv_by_std_in_grpo": False}
    assert advantages_of([1, 0, 0, 0, 0], ["u"] * 5, config=off) == pytest.approx([0.8, -0.2, -0.2, -0.2, -0.2])


@pytest.mark.parametrize("normalise", [True, False])
def test_unequal_groups_match_the_plain_formula_with_sample_deviation(normalise):
    result = advantages_of(SCORES, UNEQUAL, norm_adv_by_std_in_grpo=normalise)
    assert result == pytest.approx(plain(SCORES, UNEQUAL, normalise), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shuffling_the_rows_shuffles_the_advantages_to_the_bit(dtype):
    random = np.random.default_rng(3)
    scores, index = random.normal(size=200).tolist(), random.integers(0, 9, size=200).tolist()
    order = random.permutation(200)
    straight = advantages_of(scores, index, dtype=dtype)
    shuffled = advantages_of([scores[i] for i in order], [index[i] for i in order], dtype=dtype)
    assert shuffled == [straight[i] for i in order]


def test_rewards_spread_over_tokens_equal_their_sum_on_the_last_token():
    spread = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0], [0.25, 0.0, 0.25]])
    index, mask = np.array([1, 1, 1]), torch.ones(3, 3)
    first, _ = compute_grpo_outcome_advantage(spread, mask, index)
    second, _ = compute_grpo_outcome_advantage(outcome([1, 0, 0.5], dtype=torch.float32), mask, index)
    assert torch.equal(first, second)


def test_without_division_it_is_score_minus_group_mean_exactly():
    assert advantages_of([3, 1, 2, 10, 20], [0, 0, 0, 1, 1], norm_adv_by_std_in_grpo=False) == [1, -1, 0, -5, 5]


@pytest.mark.parametrize("score", [0.1, 0.7, -0.3, 1e6 + 0.1, 0.0])
@pytest.mark.parametrize("size", [2, 3, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_0(score, size, dtype):
    assert advantages_of([score] * size, ["u"] * size, dtype=dtype) == [0.0] * size


@pytest.mark.parametrize("normalise", [True, False])
def test_a_group_of_one_keeps_its_score(normalise):
    result = advantages_of([0.7, 1.0, 0.0], ["alone", "u", "u"], norm_adv_by_std_in_grpo=normalise)
    assert result[0] == 0.7
    assert all(np.isfinite(result))


def test_returns_are_the_advantages_of_shape_rows_by_length():
    rewards = outcome([1, 0], width=4)
    advantages, returns = compute_grpo_outcome_advantage(rewards, torch.ones_like(rewards), np.array(["u", "u"]))
    assert torch.equal(advantages, returns)
    assert advantages.shape == (2, 4)


def test_index_of_another_length_names_both_lengths():
    with pytest.raises(AlgorithmError, match=r"3 entries.*5 rows"):
        compute_grpo_outcome_advantage(torch.zeros(5, 2), torch.ones(5, 2), np.array(["a", "a", "b"]))


def test_without_index_the_error_says_what_is_missing():
    with pytest.raises(AlgorithmError, match="uid"):
        compute_grpo_outcome_advantage(torch.zeros(2, 2), torch.ones(2, 2))


def test_values_do_not_matter():
    rewards, mask, index = outcome([1, 0]), torch.ones(2, 3), np.array([0, 0])
    plain_result, _ = compute_advantage("grpo", token_level_rewards=rewards, response_mask=mask, index=index)
    with_values, _ = compute_advantage(
        "grpo", token_level_rewards=rewards, response_mask=mask, index=index, values=torch.full((2, 3), 9.0)
    )
    assert torch.equal(plain_result, with_values)


def test_distances_count_and_not_ranks():
    assert advantages_of([1, 0.9, 0], [0, 0, 0]) != pytest.approx(advantages_of([1, 0.1, 0], [0, 0, 0]), abs=0.1)


def test_index_may_be_a_list_or_a_tensor_and_rewards_half_precision():
    rewards = outcome([1, 0, 0, 0, 0], dtype=torch.bfloat16)
    for index in ([4] * 5, torch.full((5,), 4)):
        result, _ = compute_grpo_outcome_advantage(rewards, torch.ones(5, 3), index)
        assert result.dtype == torch.bfloat16
        assert result[0, 0].item() == pytest.approx(1.78885, abs=0.01)
