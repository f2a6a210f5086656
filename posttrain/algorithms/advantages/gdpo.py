"""GDPO: every part of the reward is normalised within its group by itself; the sum is normalised over the batch.

    A_i^k = (r_i^k - mean(r^k)) / (std(r^k) + epsilon)       k: parts of the reward; over the n responses to one prompt
    S_i   = sum over k of w_k * A_i^k
    A_i   = (S_i - mean(S)) / (std(S) + epsilon)             over all responses of the batch

Summed first and normalised then, as `grpo` does, different mixtures of parts (right but badly formatted, wrong but
well formatted) fall onto the same advantage, and the part with the largest spread drowns the others. Normalised one by
one, each part counts by its weight alone. In a group of one each part keeps its value.

Source: GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization,
arXiv 2601.05242.

When to use: a reward function that returns a dict of several numbers (correctness, format, length), all of which
matter.

Settings: algorithm.adv_estimator=gdpo, algorithm.gdpo_reward_keys (null: all parts that are numbers),
algorithm.gdpo_reward_weights (null: 1 each), algorithm.norm_adv_by_std_in_grpo, actor_rollout_ref.rollout.n.
The `score` beside the parts is reported but not learnt from; a reward without parts counts as one part.

Watch: reward/PART/mean for every part (each should rise), reward_mean.

Signs of failure: one part that falls while the others rise (raise its weight, or make it a condition of the others in
the reward function).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from posttrain.algorithms.advantages.groups import (
    EPSILON,
    above_mean,
    group_of_rows,
    normalised,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.common import AlgorithmError, setting
from posttrain.algorithms.registry import AdvantageEstimator, register_adv_est


@register_adv_est(AdvantageEstimator.GDPO, compares_group=True)
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    reward_parts: Sequence[Mapping[str, Any]] | None = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, advantages), each (rows, response length), 0 outside the mask; `reward_parts` is a dict per row."""
    group_B = group_of_rows(index, len(token_level_rewards), "gdpo")
    parts_KB = _parts(reward_parts, setting(config, "gdpo_reward_keys", None)) or [outcome_scores(token_level_rewards)]
    weights_K = _weights(setting(config, "gdpo_reward_weights", None), len(parts_KB))
    relative = normalised if setting(config, "norm_adv_by_std_in_grpo", True) else above_mean
    sums_B = sum(weight * relative(part_B, group_B) for weight, part_B in zip(weights_K, parts_KB, strict=True))
    assert isinstance(sums_B, np.ndarray)

    counted_B = np.sort(
        sums_B[response_mask.bool().any(dim=-1).cpu().numpy()]
    )  # sorted: any order of rows adds up alike
    several = len(counted_B) > 1
    mean = counted_B.mean() if several else 0.0
    deviation = np.sqrt(np.square(counted_B - mean).sum() / (len(counted_B) - 1)) if several else 1.0
    advantages_BT = on_every_token((sums_B - mean) / (deviation + EPSILON), token_level_rewards, response_mask)
    return advantages_BT, advantages_BT


def _parts(reward_parts: Sequence[Mapping[str, Any]] | None, keys: Sequence[str] | None) -> list[np.ndarray]:
    """(B,) per part, none if the reward gave none. A row whose reward failed has no parts: they count as 0 there."""
    rows = [dict(part or {}) for part in reward_parts] if reward_parts is not None else []
    numeric = sorted({name for row in rows for name, value in row.items() if isinstance(value, bool | int | float)})
    wanted = list(keys) if keys is not None else numeric
    missing = [name for name in wanted if name not in numeric]
    if missing:
        raise AlgorithmError(
            f"algorithm.gdpo_reward_keys: the reward has no part {', '.join(map(repr, missing))} (numbers it gave: "
            f"{', '.join(numeric) or 'none'}). Return a dict with `score` and a number per part from it."
        )
    return [np.array([float(row.get(name, 0.0)) for row in rows]) for name in wanted]


def _weights(weights: Sequence[float] | None, parts: int) -> list[float]:
    if weights is None:
        return [1.0] * parts
    if len(weights) != parts:
        raise AlgorithmError(f"algorithm.gdpo_reward_weights has {len(weights)} weights for {parts} parts.")
    return [float(weight) for weight in weights]
