"""Every estimator against its paper's formula, written here in plain Python, one response and token at a time."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from posttrain.algorithms import AlgorithmError, compute_advantage
from posttrain.algorithms.registry import ADV_ESTIMATORS
from posttrain.config.root import AlgorithmConfig

GROUPS = ["b", "a", "b", "c", "a", "b", "d", "d", "e", "d", "b", "e", "f", "f", "f", "e"]  # c is a group of one
EPSILON = 1e-6


def written(case, row: int) -> list[int]:
    """The places of the tokens that the policy wrote."""
    return [t for t in range(case.mask.shape[1]) if case.mask[row, t]]


def scores_of(case) -> list[float]:
    return [math.fsum(row) for row in case.rewards.tolist()]


def members(case, row: int) -> list[int]:
    return [other for other in range(len(GROUPS)) if case.index[other] == case.index[row]]


def to_go(case, row: int, t: int, gamma: float = 1.0) -> float:
    """What is earned from t on: each later written token is one step of discount; observations cost none."""
    total = 0.0
    for later in range(t, case.mask.shape[1]):
        # A reward on an observation belongs to the last token written before it.
        steps = sum(1 for place in written(case, row) if t < place <= later)
        total += gamma**steps * case.rewards[row, later].item()
    return total


def per_row(case, value) -> torch.Tensor:
    """(B, T) `value(row)` on written tokens."""
    out = torch.zeros(case.mask.shape, dtype=torch.float64)
    for row in range(len(GROUPS)):
        for t in written(case, row):
            out[row, t] = value(row)
    return out


def per_token(case, value) -> torch.Tensor:
    out = torch.zeros(case.mask.shape, dtype=torch.float64)
    for row in range(len(GROUPS)):
        for t in written(case, row):
            out[row, t] = value(row, t)
    return out


def whitened(case, values: torch.Tensor) -> torch.Tensor:
    flat = [values[row, t].item() for row in range(len(GROUPS)) for t in written(case, row)]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return per_token(case, lambda row, t: (values[row, t].item() - mean) / math.sqrt(variance + 1e-8))


def group_relative(values: list[float], case, row: int, divide: bool) -> float:
    group = [values[other] for other in members(case, row)]
    if len(group) == 1:
        return values[row]
    distance = values[row] - statistics.mean(group)  # exact: the mean of equal numbers is that number
    return distance / (statistics.stdev(group) + EPSILON) if divide else distance


def plain_grpo(case, divide: bool = True):
    return per_row(case, lambda row: group_relative(scores_of(case), case, row, divide))


def plain_grpo_passk(case, divide: bool = True):
    scores = scores_of(case)

    def value(row: int) -> float:
        group = sorted((scores[other] for other in members(case, row)), reverse=True)
        if len(group) == 1:
            return scores[row]
        if scores[row] != group[0]:
            return 0.0
        return (group[0] - group[1]) / (statistics.stdev(group) + EPSILON if divide else 1.0)

    return per_row(case, value)


def plain_rloo(case):
    scores = scores_of(case)

    def value(row: int) -> float:
        others = [scores[other] for other in members(case, row) if other != row]
        return scores[row] - statistics.fmean(others) if others else scores[row]

    return per_row(case, value)


def plain_remax(case):
    return per_token(case, lambda row, t: to_go(case, row, t) - case.reward_baselines[row].item())


def plain_reinforce_plus_plus(case, gamma: float = 1.0):
    return whitened(case, per_token(case, lambda row, t: to_go(case, row, t, gamma)))


def plain_reinforce_plus_plus_baseline(case):
    return whitened(case, plain_grpo(case, divide=False))


def plain_opo(case):
    scores = scores_of(case)

    def value(row: int) -> float:
        group = members(case, row)
        if len(group) == 1:
            return scores[row]
        lengths = {other: len(written(case, other)) for other in group}
        return scores[row] - sum(lengths[o] * scores[o] for o in group) / sum(lengths.values())

    return per_row(case, value)


def plain_gpg(case):
    scores = scores_of(case)
    signal = 0
    for row in range(len(GROUPS)):
        group = [scores[other] for other in members(case, row)]
        signal += (max(group) > min(group)) if len(group) > 1 else scores[row] != 0
    alpha = len(GROUPS) / max(signal, 1)
    return per_row(case, lambda row: alpha * group_relative(scores, case, row, divide=False))


def plain_gdpo(case, weights=(1.0, 1.0, 1.0)):
    names = ("format", "length", "right")
    sums = []
    for row in range(len(GROUPS)):
        parts = [[part[name] for part in case.reward_parts] for name in names]
        sums.append(sum(w * group_relative(p, case, row, True) for w, p in zip(weights, parts, strict=True)))
    counted = [sums[row] for row in range(len(GROUPS)) if written(case, row)]
    mean, deviation = statistics.fmean(counted), statistics.stdev(counted)
    return per_row(case, lambda row: (sums[row] - mean) / (deviation + EPSILON))


def codapo_value(case, row: int, key: str) -> float:
    """Confidence times the parabola over difficulty, of the row's prompt."""
    group = members(case, row)
    means = [math.fsum(case.old_log_probs[o, t].item() for t in written(case, o)) for o in group]
    means = [total / max(len(written(case, o)), 1) for total, o in zip(means, group, strict=True)]
    difficulty = 1 - sum(case.reward_parts[other][key] == 1 for other in group) / len(group)
    return math.exp(math.fsum(means) / len(group)) * (1 - 4 * (difficulty - 0.5) ** 2)


def plain_codapo(case, offset: float = 0.1, key: str = "acc"):
    scores = scores_of(case)
    return per_row(
        case, lambda row: (codapo_value(case, row, key) + offset) * group_relative(scores, case, row, divide=True)
    )


def plain_optimal_token_baseline(case):
    def energy(row: int, count: int) -> float:
        return sum(
            1 - 2 * math.exp(case.old_log_probs[row, t].item()) + case.sum_pi_squared[row, t].item()
            for t in written(case, row)[:count]
        )

    def value(row: int, t: int) -> float:
        place = written(case, row).index(t)
        longer = [other for other in members(case, row) if len(written(case, other)) > place]
        if len(longer) == 1:
            return to_go(case, row, t)
        weights = [energy(other, place + 1) for other in longer]
        returns = [to_go(case, other, written(case, other)[place]) for other in longer]
        return to_go(case, row, t) - sum(w * g for w, g in zip(weights, returns, strict=True)) / sum(weights)

    return per_token(case, value)


def plain_gae(case, gamma: float = 1.0, lam: float = 1.0):
    raw = torch.zeros(case.mask.shape, dtype=torch.float64)
    for row in range(len(GROUPS)):
        places = written(case, row)
        for step, t in enumerate(places):
            total = 0.0
            for ahead, later in enumerate(places[step:]):
                following = places[step + ahead + 1] if step + ahead + 1 < len(places) else None
                until = following if following is not None else case.mask.shape[1]
                reward = sum(case.rewards[row, k].item() for k in range(later, until))
                value = case.values[row, following].item() if following is not None else 0.0
                total += (gamma * lam) ** ahead * (reward + gamma * value - case.values[row, later].item())
            raw[row, t] = total
    return whitened(case, raw)


PLAIN = {name.removeprefix("plain_"): found for name, found in [*globals().items()] if name.startswith("plain_")}


@pytest.fixture
def case(ragged) -> SimpleNamespace:
    """Ragged rows with observation spans, groups of 1 to 5, a reward on an observation, and all that any needs."""
    generator = torch.Generator().manual_seed(3)
    rewards = ragged.rewards.clone()
    rewards[2, 3] = 0.7  # on an observation token
    uniform = torch.rand(16, 7, generator=generator, dtype=torch.float64)
    log_probs = uniform.log()
    parts = [
        {"right": float(row % 3 == 0), "format": float(row % 2), "length": uniform[row, 0].item(), "note": "text"}
        | {"acc": float(row % 4 > 1)}
        for row in range(16)
    ]
    return SimpleNamespace(
        mask=ragged.mask,
        rewards=rewards,
        index=np.array(GROUPS, dtype=object),
        values=ragged.values,
        old_log_probs=log_probs,
        sum_pi_squared=uniform**2 + 0.3 * (1 - uniform) ** 2,
        reward_baselines=torch.randn(16, generator=generator, dtype=torch.float64),
        reward_parts=np.array(parts, dtype=object),
    )


def estimate(name: str, case, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_advantage(
        name,
        token_level_rewards=case.rewards,
        response_mask=case.mask,
        index=case.index,
        config=AlgorithmConfig(adv_estimator=name, **settings),
        values=case.values,
        old_log_probs=case.old_log_probs,
        rollout_log_probs=case.old_log_probs,
        sum_pi_squared=case.sum_pi_squared,
        reward_baselines=case.reward_baselines,
        reward_parts=case.reward_parts,
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-11)


def test_every_estimator_has_a_plain_formula_here():
    assert set(PLAIN) == set(ADV_ESTIMATORS)


@pytest.mark.parametrize("name", PLAIN)
def test_the_advantages_equal_the_plain_formula(case, name):
    advantages, returns = estimate(name, case)
    assert same(advantages, PLAIN[name](case))
    assert not advantages[case.mask == 0].any()
    assert not returns[case.mask == 0].any()
    assert advantages.abs().max() > 0.1


@pytest.mark.parametrize("name", PLAIN)
def test_equal_rewards_give_no_advantage_but_where_there_is_no_group(case, name):
    case.rewards = torch.zeros_like(case.rewards)
    for row in range(16):
        if written(case, row):
            case.rewards[row, written(case, row)[-1]] = 0.1
    case.reward_parts = np.array([{"right": 0.1, "format": 1.0, "length": 0.3, "acc": 0.0}] * 16, dtype=object)
    advantages, _ = estimate(name, case)
    assert torch.isfinite(advantages).all()
    if ADV_ESTIMATORS[name].compares_group and name not in ("gdpo", "reinforce_plus_plus_baseline"):
        full = [
            row
            for row in range(16)
            if len(members(case, row)) > 1 and all(written(case, o) for o in members(case, row))
        ]
        shared = [(row, t) for row in full for t in written(case, row)]
        if name == "optimal_token_baseline":
            shared = [(row, t) for row, t in shared if t == written(case, row)[0]]
        assert max(abs(advantages[row, t].item()) for row, t in shared) < 1e-12
    assert same(advantages, PLAIN[name](case))


@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ("gae", "remax", "reinforce_plus_plus")])
def test_groups_of_one_are_finite_and_keep_the_order_of_their_rewards(case, name):
    case.index = np.arange(16)
    advantages, _ = estimate(name, case)
    assert torch.isfinite(advantages).all()
    if name in ("grpo", "grpo_passk", "rloo", "opo"):
        assert same(advantages, per_row(case, lambda row: scores_of(case)[row]))


@pytest.mark.parametrize("name", PLAIN)
def test_shuffled_rows_give_shuffled_advantages(case, name):
    before, _ = estimate(name, case)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    for field, value in vars(case).items():
        setattr(case, field, value[order.numpy()] if isinstance(value, np.ndarray) else value[order])
    assert torch.allclose(estimate(name, case)[0], before[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PLAIN)
def test_float32_rewards_give_float32_advantages_and_padding_changes_nothing(case, name):
    before, _ = estimate(name, case)
    for field in ("mask", "rewards", "values", "old_log_probs", "sum_pi_squared"):
        value = getattr(case, field)
        setattr(case, field, torch.cat([value, torch.zeros_like(value[:, :2])], dim=1))
    case.rewards = case.rewards.float()
    padded, _ = estimate(name, case)
    assert padded.dtype == (torch.float64 if name == "gae" else torch.float32)  # gae: that of its values
    assert torch.allclose(padded[:, :7].double(), before, atol=1e-5)


@pytest.mark.parametrize("gamma", [0.9, 0.0])
def test_reinforce_plus_plus_discounts_by_written_tokens(case, gamma):
    advantages, returns = estimate("reinforce_plus_plus", case, gamma=gamma)
    assert same(advantages, plain_reinforce_plus_plus(case, gamma))
    assert same(returns, per_token(case, lambda row, t: to_go(case, row, t, gamma)))


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 0.0)])
def test_gae_discounts_by_written_tokens(case, gamma, lam):
    assert same(estimate("gae", case, gamma=gamma, lam=lam)[0], plain_gae(case, gamma, lam))


@pytest.mark.parametrize("name", ["grpo", "grpo_passk"])
def test_the_division_by_the_deviation_can_be_left_out(case, name):
    assert same(estimate(name, case, norm_adv_by_std_in_grpo=False)[0], PLAIN[name](case, divide=False))


def test_codapo_weighs_by_the_part_that_is_named_and_repeats_the_most_valuable_prompts(case):
    own = {"codapo_weight_offset": 0.4, "codapo_accuracy_key": "right"}
    advantages, _ = estimate("codapo", case, **own)
    assert same(advantages, plain_codapo(case, 0.4, "right"))
    tensors = {"rollout_log_probs": case.old_log_probs, "response_mask": case.mask}
    batch = SimpleNamespace(
        batch=tensors, non_tensor_batch={"uid": case.index, "reward_parts": case.reward_parts}, meta_info={}
    )
    values = {uid: codapo_value(case, row, "right") for row, uid in enumerate(GROUPS)}
    for count in (1, 3):
        config = AlgorithmConfig(adv_estimator="codapo", codapo_top_k=count, **own)
        chosen = ADV_ESTIMATORS["codapo"].prompts_to_repeat(batch, config)
        assert chosen == sorted(values, key=lambda uid: -values[uid])[:count]
    with pytest.raises(AlgorithmError, match="the parts are acc, format, length, note, right"):
        estimate("codapo", case, codapo_accuracy_key="correct")


def test_gpg_makes_up_for_groups_without_signal():
    rewards = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    mask, index = torch.ones(4, 1), np.array(["a", "a", "b", "b"])
    advantages, _ = compute_advantage("gpg", token_level_rewards=rewards, response_mask=mask, index=index)
    assert advantages[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]  # alpha is 4 / 2


def test_gdpo_weighs_the_parts_that_are_named(case):
    keys, weights = ["format", "length", "right"], [0.5, 2.0, 1.0]
    advantages, _ = estimate("gdpo", case, gdpo_reward_keys=keys, gdpo_reward_weights=weights)
    assert same(advantages, plain_gdpo(case, weights))


def test_gdpo_tells_mixtures_apart_that_grpo_cannot(case):
    """Two right and badly formatted, two wrong and well formatted: their sums are equal, their parts are not."""
    parts = [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    small = {"response_mask": torch.ones(4, 1), "index": np.array(["u"] * 4)}
    rewards = torch.tensor([[sum(part.values())] for part in parts], dtype=torch.float64)
    grpo, _ = compute_advantage("grpo", token_level_rewards=rewards, **small)
    gdpo, _ = compute_advantage("gdpo", token_level_rewards=rewards, reward_parts=parts, **small)
    assert grpo[0] == grpo[2]
    assert gdpo[0] != gdpo[2]


@pytest.mark.parametrize(
    ("name", "missing", "text"),
    [
        ("remax", "reward_baselines", "greedy"),
        ("optimal_token_baseline", "sum_pi_squared", "sum_pi_squared"),
        ("rloo", "index", "uid"),
    ],
)
def test_what_an_estimator_lacks_is_named(case, name, missing, text):
    setattr(case, missing, None)
    with pytest.raises(AlgorithmError, match=text):
        estimate(name, case)


def test_gdpo_names_a_part_that_the_reward_does_not_give_and_counts_weights(case):
    with pytest.raises(AlgorithmError, match="no part 'style'"):
        estimate("gdpo", case, gdpo_reward_keys=["right", "style"])
    with pytest.raises(AlgorithmError, match="2 weights for 3 parts"):
        estimate("gdpo", case, gdpo_reward_weights=[1.0, 2.0])


def test_gdpo_of_a_reward_without_parts_is_grpo_normalised_over_the_batch(case):
    case.reward_parts = None
    grpo = [group_relative(scores_of(case), case, row, True) for row in range(16)]
    counted = [grpo[row] for row in range(16) if written(case, row)]
    mean, deviation = statistics.fmean(counted), statistics.stdev(counted)
    assert same(estimate("gdpo", case)[0], per_row(case, lambda row: (grpo[row] - mean) / (deviation + EPSILON)))


def test_rloo_of_one_right_among_five():
    rewards = torch.tensor([[1.0], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    advantages, _ = compute_advantage(
        "rloo", token_level_rewards=rewards, response_mask=torch.ones(5, 1), index=np.array(["u"] * 5)
    )
    assert advantages.flatten().tolist() == pytest.approx([1.0, -0.25, -0.25, -0.25, -0.25])
