"""GDPO: each part of the reward is normalised within its group, and the weighted sum is normalised over the batch.

    A_i^k = (r_i^k - mean(r^k)) / (std(r^k) + epsilon)       k: parts of the reward; over the n responses to one prompt
    S_i   = sum over k of w_k * A_i^k
    A_i   = (S_i - mean(S)) / (std(S) + epsilon)             over all responses of the batch

`grpo` sums the parts first. Then different mixtures of parts (right but badly formatted, wrong but well formatted) get
the same advantage, and the part with the largest spread dominates. Normalised separately, each part counts by its
weight alone. In a group of one, each part keeps its value.

Source: GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization,
arXiv 2601.05242.

When to use: the reward function returns several numbers (correctness, format, length), and all of them matter.

Settings: algorithm.adv_estimator=gdpo, algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights,
algorithm.norm_adv_by_std_in_grpo, actor_rollout_ref.rollout.n. Without keys, the parts are the functions of
reward.functions, or a reward model and the function used with it, each with its own weight (weight 0: only recorded).
For a single function they are the numbers that it returns besides `score`, except `acc`, `pred` and `answer`; if there
are none, the score. reward.overlong_buffer is a separate part, weighted by its penalty_factor. A part that a response
lacks (None, NaN, a text, or a failed reward) counts as reward.failure_score.

Watch: reward/PART/mean for every part (each should rise), reward_mean.

Signs of failure: one part falls while the others rise (raise its weight, or make it a condition of the others in the
reward function).
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
    """Which parts of the reward count, and with which weights."""

    gdpo_reward_keys: list[str] | None = None
    """Parts of the reward that `gdpo` normalises separately; null means the terms of the reward's sum, or the numbers
    that a function returned besides its score."""
    gdpo_reward_weights: list[float] | None = None
    """One weight per part in `gdpo`; null means the parts' own weights in the reward, or 1."""


@register_adv_est(
    "gdpo",
    settings=GDPOSettings,
    reads=("norm_adv_by_std_in_grpo",),
    compares_group=True,
    several_rows="sample",
    per_response=True,
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
    """Return (advantages, advantages), each (rows, response length), 0 outside the mask.

    `reward_parts` is a dict per row. `reward_scores` and `reward_errors` are the reward's own results (null: the rows'
    sums, no errors), `reward_weights` the weights of its sum. A part that a row lacks counts as `failure_score`.
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
    # Without the deviation a part counts by its spread as well as by its weight.
    relative = normalised if read_setting(config, "norm_adv_by_std_in_grpo", True) else above_mean
    # Each part is relative to its own group first; only then do the weights apply.
    sums_B = np.zeros(rows)
    for term in terms:
        sums_B += term.weight * relative(term.values_B, group_B)

    # Sorted, so that the sum does not depend on the order of rows. Rows without response tokens do not count.
    counted_B = np.sort(sums_B[response_mask.bool().any(dim=-1).cpu().numpy()])
    # A batch of one has no deviation: its sum is kept as it is.
    several = len(counted_B) > 1
    mean = counted_B.mean() if several else 0.0
    deviation = np.sqrt(np.square(counted_B - mean).sum() / (len(counted_B) - 1)) if several else 1.0
    advantages_BT = on_every_token((sums_B - mean) / (deviation + EPSILON), token_level_rewards, response_mask)
    return advantages_BT, advantages_BT


def _weighed(terms: list[Term], weights: Sequence[float] | None) -> list[Term]:
    # With the user's weights, if given; the overlong penalty keeps its own factor.
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
