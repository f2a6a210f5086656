"""What the estimators share: scores of responses, statistics of groups, reward-to-go, spreading over tokens.

Statistics are taken on the host, in float64 and in order of size, so that neither row order nor device changes a
result. Scores of a group are first taken relative to its lowest: the rounded mean of equal numbers can differ from
them (three times 0.1), and a division by their tiny deviation would turn that rounding into an advantage.

Shapes: B rows, T response tokens. An array (B,) of a group's statistic holds, for each row, that of its own group.
"""

from __future__ import annotations

from typing import Any

from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.lazy import numpy as np
from posttrain.lazy import torch

EPSILON = 1e-6


def outcome_scores(token_level_rewards: torch.Tensor) -> np.ndarray:
    """(B,) the sum of each response's rewards, wherever in it they stand."""
    return token_level_rewards.detach().sum(dim=-1).to("cpu", torch.float64).numpy()


def group_of_rows(index: Any, rows: int, estimator: str) -> np.ndarray:
    """(B,) the number of each row's group; `index` names the groups (the `uid` array)."""
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
    return np.unique(names_B, return_inverse=True)[1]


def group_size(group_B: np.ndarray) -> np.ndarray:
    return np.bincount(group_B)[group_B]


def group_sum(values_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """The sum over each row's group, the same to the bit in any order of rows."""
    order = np.lexsort((values_B, group_B))
    return np.bincount(group_B[order], weights=values_B[order])[group_B]


def above_lowest(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Each score less the lowest of its group: exactly 0 in a group of equal scores."""
    lowest_G = np.full(group_B.max(initial=-1) + 1, np.inf)
    np.minimum.at(lowest_G, group_B, scores_B)
    return scores_B - lowest_G[group_B]


def above_mean(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Each score less the mean of its group; a group of one keeps its score."""
    above_B, size_B = above_lowest(scores_B, group_B), group_size(group_B)
    return np.where(size_B == 1, scores_B, above_B - group_sum(above_B, group_B) / size_B)


def group_deviation(scores_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """The sample deviation (n - 1) of each row's group; 0 for a group of one."""
    size_B = group_size(group_B)
    distance_B = np.where(size_B == 1, 0.0, above_mean(scores_B, group_B))
    return np.sqrt(group_sum(distance_B**2, group_B) / np.maximum(size_B - 1, 1))


def normalised(scores_B: np.ndarray, group_B: np.ndarray, epsilon: float = EPSILON) -> np.ndarray:
    """Distance from the group's mean over its deviation; a group of one keeps its score."""
    distance_B = above_mean(scores_B, group_B)
    several_B = group_size(group_B) > 1
    return np.where(several_B, distance_B / (group_deviation(scores_B, group_B) + epsilon), scores_B)


def on_every_token(values_B: np.ndarray, rewards_BT: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(B, T) one number per response on each token that the policy wrote, 0 elsewhere."""
    dtype = rewards_BT.dtype if rewards_BT.is_floating_point() else torch.float32
    values_B1 = torch.from_numpy(values_B).to(rewards_BT.device, dtype).unsqueeze(-1)
    return keep_masked(values_B1.expand(rewards_BT.shape), response_mask)


def reward_to_go(rewards_BT: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """(B, T) in float64: what a response still earns from each token on, discounted per token that the policy wrote.

    Tokens that it did not write are stepped over: they cost no discount, and a reward placed on them is credited to
    the tokens before them.
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
    """The values under the mask with mean 0 and sample variance 1; 0 elsewhere, and for a single value."""
    count = mask.bool().sum()
    centred = keep_masked(values - keep_masked(values, mask).sum() / count.clamp(min=1), mask)
    variance = (centred**2).sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)
