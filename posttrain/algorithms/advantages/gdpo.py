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

Settings: algorithm.adv_estimator=gdpo, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights,
algorithm.norm_adv_by_std_in_grpo, actor_rollout_ref.rollout.n. Without keys the parts are the functions of
reward.functions, or a reward model and the function beside it, each with its own weight (one of weight 0 is only
recorded); of a single function the numbers beside its `score`, but not `acc`, `pred` and `answer`; where there are
none, the score. reward.overlong_buffer is a part of its own, its penalty_factor the weight. A part that a response
lacks (None, NaN, a text, or a reward that failed) counts as reward.failure_score.

Watch: reward/PART/mean for every part (each should rise), reward_mean.

Signs of failure: one part that falls while the others rise (raise its weight, or make it a condition of the others in
the reward function).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.advantages.groups import (
    EPSILON,
    above_mean,
    group_of_rows,
    normalised,
    on_every_token,
    outcome_scores,
)
from posttrain.algorithms.common import AlgorithmError, read_setting
from posttrain.algorithms.registry import own_settings, register_adv_est
from posttrain.algorithms.reward_terms import OVERLONG, Term, reward_terms
from posttrain.lazy import numpy as np
from posttrain.lazy import torch


@dataclass
class GDPOSettings:
    """Which parts of the reward count, and how much."""

    gdpo_reward_keys: list[str] | None = None
    """Parts of the reward that `gdpo` normalises one by one; null takes those that the reward is the sum of, or the
    numbers that a function gave beside its score."""
    gdpo_reward_weights: list[float] | None = None
    """One weight per part in `gdpo`; null takes the parts' own weights in the reward, 1 where they have none."""


@register_adv_est(
    "gdpo",
    settings=GDPOSettings,
    reads=("norm_adv_by_std_in_grpo",),
    compares_group=True,
    reads_reward_parts=True,
)
def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any = None,
    reward_parts: Sequence[Mapping[str, Any] | None] | None = None,
    reward_scores: Sequence[float] | None = None,
    reward_errors: Sequence[str | None] | None = None,
    reward_weights: Mapping[str, float] | None = None,
    failure_score: float = 0.0,
    config: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, advantages), each (rows, response length), 0 outside the mask.

    `reward_parts` is a dict per row, `reward_scores` and `reward_errors` what the reward gave beside them (null: the
    rows' own sums, no errors), `reward_weights` the weighted sum that the reward is, `failure_score` what a part that a
    row lacks counts as.
    """
    own, rows = own_settings(GDPOSettings, config), len(token_level_rewards)
    group_B = group_of_rows(index, rows, "gdpo")
    terms = reward_terms(
        outcome_scores(token_level_rewards) if reward_scores is None else np.asarray(reward_scores, dtype=np.float64),
        [None] * rows if reward_parts is None else reward_parts,
        [False] * rows if reward_errors is None else [error is not None for error in reward_errors],
        keys=own.gdpo_reward_keys,
        weights=reward_weights,
        failure_score=failure_score,
    )
    terms = _weighed(terms, own.gdpo_reward_weights)
    relative = normalised if read_setting(config, "norm_adv_by_std_in_grpo", True) else above_mean
    sums_B = np.zeros(rows)
    for term in terms:
        sums_B += term.weight * relative(term.values_B, group_B)

    counted_B = np.sort(
        sums_B[response_mask.bool().any(dim=-1).cpu().numpy()]
    )  # sorted: any order of rows adds up alike
    several = len(counted_B) > 1
    mean = counted_B.mean() if several else 0.0
    deviation = np.sqrt(np.square(counted_B - mean).sum() / (len(counted_B) - 1)) if several else 1.0
    advantages_BT = on_every_token((sums_B - mean) / (deviation + EPSILON), token_level_rewards, response_mask)
    return advantages_BT, advantages_BT


def _weighed(terms: list[Term], weights: Sequence[float] | None) -> list[Term]:
    """The terms with the weights that the user gave, if any; the overlong penalty keeps its own factor."""
    if weights is None:
        return terms
    named = [term for term in terms if term.name != OVERLONG]
    if len(weights) != len(named):
        names = ", ".join(term.name for term in named)
        raise AlgorithmError(
            f"algorithm.gdpo_reward_weights has {len(weights)} weights for {len(named)} parts ({names})."
        )
    given = dict(zip([term.name for term in named], weights, strict=True))
    return [term._replace(weight=float(given.get(term.name, term.weight))) for term in terms]
