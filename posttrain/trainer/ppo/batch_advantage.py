"""Advantages of a batch by an estimator's name: what the estimator is given of the batch, and where its answer goes."""

from __future__ import annotations

from typing import Any

from posttrain import algorithms
from posttrain.algorithms import AdvantageEstimator
from posttrain.config.algorithm import AlgorithmConfig
from posttrain.protocol import DataProto

ESTIMATOR_FIELDS = ("values", "old_log_probs", "ref_log_prob", "reward_baselines", "sum_pi_squared")
REWARD_FIELDS = {"reward_parts": "reward_parts", "reward_score": "reward_scores", "reward_error": "reward_errors"}


def compute_advantage(
    data: DataProto,
    adv_estimator: str | AdvantageEstimator,
    *,
    config: AlgorithmConfig | None = None,
    **settings: Any,
) -> DataProto:
    """`data` with `advantages` and `returns`, from its `token_level_rewards`, `response_mask` and `uid`."""
    batch = data.batch
    found: dict[str, Any] = {name: batch[name] for name in ESTIMATOR_FIELDS if name in batch}
    rows = data.non_tensor_batch
    found |= {argument: rows[name] for name, argument in REWARD_FIELDS.items() if name in rows}
    advantages, returns = algorithms.compute_advantage(
        adv_estimator,
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        index=data.non_tensor_batch.get("uid"),
        config=config,
        data=data,
        **found,
        **settings,
    )
    batch["advantages"], batch["returns"] = advantages, returns
    return data
