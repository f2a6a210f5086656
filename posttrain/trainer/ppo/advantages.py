"""Advantages of a batch: what an estimator is given of the batch, where its answer goes, and the greedy baseline."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from posttrain import algorithms
from posttrain.config.algorithm import AlgorithmConfig
from posttrain.protocol import DataProto
from posttrain.rewards.outcomes import NONE_APPLIES
from posttrain.tracking.metrics import groups_of
from posttrain.trainer.ppo.experience import Experience

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


NEEDED = ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt"]


def greedy_baselines(experience: Experience, batch: DataProto) -> dict[str, float]:
    """The baseline of ReMax: one greedy response per prompt, scored as the others are and not trained on.

    Adds `reward_baselines` (rows,), the score of the greedy response to each row's prompt; gives metrics.
    """
    # One greedy response per prompt, not per sample: the baseline of a group is the same for all of its rows.
    groups = [list(rows) for rows in groups_of(batch.non_tensor_batch["uid"])]
    rows = experience.ask(_prompts(batch[[rows[0] for rows in groups]]), 1, greedy=True)
    greedy = experience.with_token_scores(experience.complete(rows))
    scores_G = greedy.batch["token_level_scores"].sum(-1)
    baselines_B = scores_G.new_zeros(len(batch))
    for group, members in enumerate(groups):
        baselines_B[members] = scores_G[group]
    batch.batch["reward_baselines"] = baselines_B
    return {"remax/baseline_mean": float(scores_G.mean())}


def _prompts(firsts: DataProto) -> DataProto:
    # Every prompt can have serial number 0: greedy decoding draws no random numbers.
    prompts = firsts.select([], NEEDED, [])
    width = firsts.batch["prompts"].shape[1]
    masks = firsts.batch["attention_mask"][:, :width].bool()
    ids = np.empty(len(firsts), dtype=object)
    for row, (prompt, mask) in enumerate(zip(firsts.batch["prompts"], masks, strict=True)):
        ids[row] = prompt[mask].tolist()
    uids = [f"{uid}-greedy" for uid in prompts.non_tensor_batch["uid"]]
    prompts.non_tensor_batch.update(
        {"uid": np.array(uids, dtype=object), "raw_prompt_ids": ids, "serial": np.zeros(len(ids), dtype=object)}
    )
    return prompts
