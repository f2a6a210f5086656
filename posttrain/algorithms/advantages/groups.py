"""Functions that the estimators share: scores of responses, group statistics, reward-to-go, broadcasting to tokens.

Statistics are computed on the host, in float64 and in sorted order, so that neither row order nor device changes a
result. Scores are first taken relative to the lowest of their group: the rounded mean of equal numbers can differ from
them (three times 0.1), and dividing by that tiny deviation would turn rounding into an advantage.

Shapes: B rows, T response tokens. An array (B,) of a group statistic holds each row's own group's value.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.lazy import numpy as np
from posttrain.lazy import torch

EPSILON = 1e-6


def outcome_scores(token_level_rewards: torch.Tensor) -> np.ndarray:
    """Return (B,) the sum of the rewards in each response."""
    return token_level_rewards.detach().sum(dim=-1).to("cpu", torch.float64).numpy()


def group_of_rows(index: Any, rows: int, estimator: str) -> np.ndarray:
    """Return (B,) the number of each row's group; `index` names the groups (the `uid` array)."""
    if index is None:
        raise AlgorithmError(
            f"`{estimator}` compares the responses of one prompt and needs `index`, the `uid` of each row."
        )
    names_B = np.asarray(index.cpu().numpy() if isinstance(index, torch.Tensor) else index)
    if names_B.shape != (rows,):
        raise AlgorithmError(
            f"`index` must name the group of each row: it has {names_B.size} entries (shape {names_B.shape}), "
            f"but `token_level_rewards` has {rows} rows."
        )
    # uids may be strings; the statistics below need consecutive numbers.
    return np.unique(names_B, return_inverse=True)[1]


def group_size(group_B: np.ndarray) -> np.ndarray:
    return np.bincount(group_B)[group_B]


def group_sum(values_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Return the sum over each row's group, bitwise identical for any order of rows."""
    # Floating-point addition depends on the order, so members are added in sorted order.
    order = np.lexsort((values_B, group_B))
    return np.bincount(group_B[order], weights=values_B[order])[group_B]


def above_lowest(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Return each score minus the lowest of its group: exactly 0 if all scores are equal."""
    # minimum.at handles repeated indices, which a plain assignment would not.
    lowest_G = np.full(group_B.max(initial=-1) + 1, np.inf)
    np.minimum.at(lowest_G, group_B, scores_B)
    return scores_B - lowest_G[group_B]


def above_mean(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Return each score minus the mean of its group; a group of one keeps its score."""
    above_B, size_B = above_lowest(scores_B, group_B), group_size(group_B)
    return np.where(size_B == 1, scores_B, above_B - group_sum(above_B, group_B) / size_B)


def group_deviation(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Return the sample deviation (n - 1) of each row's group; 0 for a group of one."""
    size_B = group_size(group_B)
    distance_B = np.where(size_B == 1, 0.0, above_mean(scores_B, group_B))
    return np.sqrt(group_sum(distance_B**2, group_B) / np.maximum(size_B - 1, 1))


def normalised(scores_B: np.ndarray, group_B: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Return the distance from the group's mean divided by its deviation; a group of one keeps its score."""
    distance_B = above_mean(scores_B, group_B)
    several_B = group_size(group_B) > 1
    return np.where(several_B, distance_B / (group_deviation(scores_B, group_B) + epsilon), scores_B)


def on_every_token(values_B: np.ndarray, rewards_BT: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return (B, T) one number per response on each token that the policy wrote, 0 elsewhere."""
    # Integer rewards would round the advantages.
    dtype = rewards_BT.dtype if rewards_BT.is_floating_point() else torch.float32
    values_B1 = torch.from_numpy(values_B).to(rewards_BT.device, dtype).unsqueeze(-1)
    return keep_masked(values_B1.expand(rewards_BT.shape), response_mask)


def reward_to_go(rewards_BT: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """Return (B, T) in float64: the reward still to come from each token on, discounted per token written.

    Other tokens are skipped: they cost no discount, and a reward on them counts for the tokens before them.
    """
    rewards_BT, mask_BT = rewards_BT.detach().double(), response_mask.bool()
    returns_BT = torch.zeros_like(rewards_BT)
    later_B = torch.zeros_like(rewards_BT[:, 0])
    for t in reversed(range(rewards_BT.shape[1])):
        # `later_B` is discounted when a written token takes it over, so a span of observations costs nothing.
        reward_B = rewards_BT[:, t]
        written_B = mask_BT[:, t]
        returns_BT[:, t] = torch.where(written_B, reward_B + later_B, returns_BT[:, t])
        later_B = torch.where(written_B, gamma * (reward_B + later_B), reward_B + later_B)
    return returns_BT


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Whiten the values under the mask to mean 0 and sample variance 1; 0 elsewhere, and for a single value."""
    count = mask.bool().sum()
    # keep_masked twice: NaN outside the mask must reach neither the mean nor the result.
    centred = keep_masked(values - keep_masked(values, mask).sum() / count.clamp(min=1), mask)
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
