"""CoDaPO: GRPO that weights prompts by confidence and difficulty, and trains on the most valuable ones a second time.

    c   = exp(mean over the group's responses of the mean log-prob of their tokens)      confidence of the rollout
    d   = 1 - share of right responses                                                   difficulty
    v   = c * (1 - 4 (d - 1/2)^2)                                                        value of a prompt
    A_i = (v + offset) * A_i of GRPO

A prompt that is always or never solved has value 0, one that is solved half of the time the highest. A prompt whose
responses are unlikely under the policy that sampled them counts less.

Every step on prompts of the data is followed by one on its most valuable prompts: the first `codapo_top_k` by value, in
turn until the batch is full, with new responses. Both count as steps.

Source: Confidence and Difficulty-Adaptive Policy Optimization, arXiv 2606.07950.

When to use: data of mixed difficulty, where many groups have no signal and others are only just learnable.

Settings: algorithm.adv_estimator=codapo, algorithm.codapo_top_k, algorithm.codapo_weight_offset,
algorithm.codapo_accuracy_key (the part of the reward that is 1 for a right response; `acc` is a score of 0.5 or more
where the reward names no such part), actor_rollout_ref.rollout.n, algorithm.norm_adv_by_std_in_grpo. Dynamic sampling
and one-step-off training are rejected: both need the next prompts before this step's responses are scored.

Watch: prompts/repeated (1 in the second steps), groups/no_signal, reward_mean in the first steps.

Signs of failure: reward_mean of the second steps rises and that of the first does not: too few prompts are repeated
(raise codapo_top_k).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.advantages.groups import group_of_rows, group_size, group_sum
from posttrain.algorithms.advantages.grpo import compute_grpo_outcome_advantage
from posttrain.algorithms.common import AlgorithmError, keep_masked
from posttrain.algorithms.registry import own_settings, register_adv_est
from posttrain.lazy import numpy as np
from posttrain.lazy import torch
from posttrain.settings import ONE_OR_MORE, ZERO_OR_MORE, setting

RIGHT = 0.5  # the least score of a right response


@dataclass
class CoDaPOSettings:
    """The settings of the estimator `codapo`."""

    codapo_top_k: int = setting(4, range=ONE_OR_MORE)
    """Prompts of a step that `codapo` repeats in the next one; more than a batch has are all of them."""
    codapo_weight_offset: float = setting(0.1, range=ZERO_OR_MORE)
    """Added to a prompt's value in `codapo`: the weight of prompts without value."""
    codapo_accuracy_key: str = "acc"
    """Part of the reward that `codapo` counts right responses by: those in which it is 1."""


def most_valuable_prompts(data: Any, config: Any) -> list[Any]:
    """Return the uids of the batch's prompts with the highest values, the highest first."""
    own, rows = own_settings(CoDaPOSettings, config, "algorithm."), data.non_tensor_batch
    right_B = right_responses(rows.get("reward_parts"), rows.get("reward_score"), own.codapo_accuracy_key)
    uids, fields = rows["uid"], data.batch
    group_B = group_of_rows(uids, len(uids), "codapo")
    values_B = prompt_values(fields["rollout_log_probs"], fields["response_mask"], right_B, group_B)
    # Of equal values the earlier prompt: sorting is stable, and a dict keeps the order of the batch.
    by_uid = dict(zip(uids, values_B.tolist(), strict=True))
    return sorted(by_uid, key=lambda uid: -by_uid[uid])[: own.codapo_top_k]


@register_adv_est(
    "codapo",
    settings=CoDaPOSettings,
    reads=("norm_adv_by_std_in_grpo",),
    compares_group=True,
    kl_belongs_in_loss=True,
    prompts_to_repeat=most_valuable_prompts,
)
def compute_codapo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    rollout_log_probs: torch.Tensor | None = None,
    reward_parts: Any = None,
    reward_scores: Any = None,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask."""
    if rollout_log_probs is None:
        raise AlgorithmError("`codapo` needs `rollout_log_probs`, the log-probs of the policy that sampled.")
    own, rows = own_settings(CoDaPOSettings, config, "algorithm."), len(token_level_rewards)
    right_B = right_responses(reward_parts, reward_scores, own.codapo_accuracy_key)
    values_B = prompt_values(rollout_log_probs, response_mask, right_B, group_of_rows(index, rows, "codapo"))
    advantages_BT, _ = compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, config=config)
    weights_B1 = torch.from_numpy(values_B + own.codapo_weight_offset).to(advantages_BT).unsqueeze(-1)
    return advantages_BT * weights_B1, advantages_BT * weights_B1


def prompt_values(
    log_probs_BT: torch.Tensor, mask_BT: torch.Tensor, right_B: np.ndarray, group_B: np.ndarray
) -> np.ndarray:
    """Return (B,) the value of each row's prompt."""
    sums_B = keep_masked(log_probs_BT.detach().double(), mask_BT).sum(-1)
    mean_B = (sums_B / mask_BT.bool().sum(-1).clamp(min=1)).cpu().numpy()
    size_B = group_size(group_B)
    confidence_B = np.exp(group_sum(mean_B, group_B) / size_B)
    difficulty_B = 1 - group_sum(right_B, group_B) / size_B
    return confidence_B * (1 - 4 * (difficulty_B - 0.5) ** 2)


def right_responses(reward_parts: Any, reward_scores: Any, key: str) -> np.ndarray:
    """Return (B,) 1 for right responses, 0 for others; a reward that failed gives none of its parts."""
    parts = [part if isinstance(part, Mapping) else {} for part in (reward_parts if reward_parts is not None else [])]
    if any(key in part for part in parts):
        return np.array([float(part.get(key) == 1) for part in parts])
    # As in validation: a reward of one number is right from 0.5 on.
    if key == "acc" and reward_scores is not None:
        return np.array([float(score >= RIGHT) for score in reward_scores])
    known = sorted({name for part in parts for name in part})
    raise AlgorithmError(
        f"`codapo` counts right responses by the part `{key}` of the reward (algorithm.codapo_accuracy_key), which no "
        f"response has; the parts are {', '.join(known) or 'none'}. Name one of them, or return a dict with `{key}` "
        "from the reward function."
    )
