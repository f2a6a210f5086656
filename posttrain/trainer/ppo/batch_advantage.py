"""Advantages of a batch by an estimator's name: what the estimator is given of the batch, and where its answer goes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from posttrain import algorithms
from posttrain.config.algorithm import AlgorithmConfig
from posttrain.protocol import DataProto
from posttrain.rewards.outcomes import NONE_APPLIES

ESTIMATOR_FIELDS = ("values", "old_log_probs", "ref_log_prob", "reward_baselines", "sum_pi_squared")
REWARD_FIELDS = {"reward_parts": "reward_parts", "reward_score": "reward_scores", "reward_error": "reward_errors"}


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    *,
    config: AlgorithmConfig | None = None,
    **settings: Any,
) -> DataProto:
    """`data` with `advantages` and `returns`, from its `token_level_rewards`, `response_mask` and `uid`.

    A response without any score (no reward function applies to it) is a group of its own, so that it is in no other's
    baseline, and its advantage is 0.
    """
    batch = data.batch
    found: dict[str, Any] = {name: batch[name] for name in ESTIMATOR_FIELDS if name in batch}
    rows = data.non_tensor_batch
    unscored_B = np.array([error == NONE_APPLIES for error in rows["reward_error"]] if "reward_error" in rows else [])
    found |= {argument: rows[name] for name, argument in REWARD_FIELDS.items() if name in rows}
    advantages, returns = algorithms.compute_advantage(
        adv_estimator,
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        index=_groups(data, unscored_B),
        config=config,
        data=data,
        **found,
        **settings,
    )
    if unscored_B.any():
        kept_B1 = torch.from_numpy(~unscored_B).to(advantages).unsqueeze(-1)
        advantages, returns = advantages * kept_B1, returns * kept_B1
    batch["advantages"], batch["returns"] = advantages, returns
    return data


def _groups(data: DataProto, unscored_B: np.ndarray) -> np.ndarray | None:
    uids = data.non_tensor_batch.get("uid")
    if uids is None or not unscored_B.any():
        return uids
    numbers: dict[Any, int] = {}
    groups = np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=object)
    # Each unscored response gets a group of its own: it must not move the mean that the others are compared with.
    groups[unscored_B] = np.arange(len(numbers), len(numbers) + unscored_B.sum())
    return groups
