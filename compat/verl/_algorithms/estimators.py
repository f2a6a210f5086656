"""verl's estimators: its signatures over posttrain's functions. Advantages are 0 outside the mask.

Where the two define an estimator differently (`gpg`, `gdpo`, the vectorised ones), the numbers here are verl's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from posttrain.algorithms.advantages import gae, grpo, grpo_passk, opo, optimal_token_baseline, remax, rloo
from posttrain.algorithms.advantages import reinforce_plus_plus as rpp
from posttrain.algorithms.advantages import reinforce_plus_plus_baseline as rpp_baseline
from posttrain.algorithms.advantages.groups import above_mean, group_of_rows, group_size, on_every_token, outcome_scores
from verl._algorithms.registries import known_estimator
from verl.utils.torch_functional import masked_whiten

Pair = tuple[torch.Tensor, torch.Tensor]


def compute_gae_advantage_return(
    token_level_rewards: torch.Tensor, values: torch.Tensor, response_mask: torch.Tensor, gamma: Any, lam: Any
) -> Pair:
    """Advantages by GAE, whitened over the mask, and returns."""
    return gae.compute_gae_advantage_return(token_level_rewards, values, response_mask, float(gamma), float(lam))


def compute_grpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Pair:
    """Distance from the group's mean, over its deviation unless switched off. A group of one keeps its score."""
    return grpo.compute_grpo_outcome_advantage(
        token_level_rewards,
        response_mask,
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )


def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Pair:
    """As `grpo`: both are computed for all groups at once here."""
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config
    )


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    """The best response of a group gets its lead over the second, the others nothing."""
    assert config is not None, "grpo_passk reads norm_adv_by_std_in_grpo from config"
    group_B = group_of_rows(index, len(token_level_rewards), "grpo_passk")
    if (group_size(group_B) < 2).any():
        raise ValueError("Pass@k requires at least 2 samples per group")
    return grpo_passk.compute_grpo_passk_outcome_advantage(token_level_rewards, response_mask, index, config=config)


def _by_group(compute: Callable[..., Pair], says: str) -> Callable[..., Pair]:
    """posttrain's function on scores and groups, with verl's signature."""

    def outcome_advantage(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        index: Any,
        epsilon: float = 1e-6,
        config: Any = None,
        **kwargs: Any,
    ) -> Pair:
        return compute(token_level_rewards, response_mask, index, config=config)

    outcome_advantage.__name__ = outcome_advantage.__qualname__ = compute.__name__
    outcome_advantage.__doc__ = says
    return outcome_advantage


compute_reinforce_plus_plus_baseline_outcome_advantage = _by_group(
    rpp_baseline.compute_reinforce_plus_plus_baseline_outcome_advantage,
    "Distance from the group's mean, whitened over all tokens of the batch.",
)
compute_rloo_outcome_advantage = _by_group(
    rloo.compute_rloo_outcome_advantage,
    "Each score less the mean of the others of its group; a group of one keeps its score.",
)
compute_opo_outcome_advantage = _by_group(
    opo.compute_opo_outcome_advantage, "Distance from the group's mean weighted by length."
)


def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    """As `rloo`, but a group of one gets nothing."""
    made, _ = compute_rloo_outcome_advantage(token_level_rewards, response_mask, index)
    alone = group_size(group_of_rows(index, len(made), "rloo_vectorized")) == 1
    made = made.masked_fill(torch.from_numpy(alone).to(made.device).unsqueeze(-1), 0.0)
    return made, made


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **kwargs: Any
) -> Pair:
    """Discounted returns, whitened over the batch."""
    assert config is not None, "reinforce_plus_plus reads gamma from config"
    return rpp.compute_reinforce_plus_plus_outcome_advantage(token_level_rewards, response_mask, config=config)


def compute_remax_outcome_advantage(
    token_level_rewards: torch.Tensor,
    reward_baselines: torch.Tensor,
    response_mask: torch.Tensor,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    """Returns less the reward of the greedy response."""
    return remax.compute_remax_outcome_advantage(
        token_level_rewards, reward_baselines=reward_baselines, response_mask=response_mask
    )


def compute_gpg_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Pair:
    """Distance from the group's mean x (rows / rows whose score is not 0) / f_norm; `alpha` is verl's and unused.

    posttrain's own `gpg`, which `algorithm.adv_estimator=gpg` trains with, counts the rows of groups with signal, as
    the paper does.
    """
    scores_B = outcome_scores(token_level_rewards)
    group_B = group_of_rows(index, len(scores_B), "gpg")
    factor = len(scores_B) / max(int(np.count_nonzero(scores_B)), 1) / f_norm
    made = on_every_token(factor * above_mean(scores_B, group_B), token_level_rewards, response_mask)
    return made, made


def compute_gdpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Any = None,
    batch: Any = None,
    **kwargs: Any,
) -> Pair:
    """Each part of the reward as in `grpo` by itself, summed by weight, then whitened over all tokens of the batch.

    posttrain's own `gdpo`, which `algorithm.adv_estimator=gdpo` trains with, takes the batch's statistics over
    responses instead of tokens.
    """
    parts, weights = [token_level_rewards], None
    if config is not None and non_tensor_batch is not None and batch is not None:
        keys = config.get("gdpo_reward_keys", None)
        assert keys, "GDPO needs algorithm.gdpo_reward_keys: the parts that the reward function gives"
        absent = [key for key in keys if key not in non_tensor_batch]
        assert not absent, f"the reward gave no part {absent}; it gave {list(non_tensor_batch)}"
        columns = [torch.as_tensor(np.asarray(non_tensor_batch[key], dtype=np.float32)) for key in keys]
        parts = [on_every_token(c.double().numpy(), token_level_rewards, _first_token(response_mask)) for c in columns]
        weights = config.get("gdpo_reward_weights", None)
        assert weights is None or len(weights) == len(keys), (
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} keys"
        )
    total = torch.zeros_like(token_level_rewards)
    for weight, part in zip(weights or [1.0] * len(parts), parts, strict=True):
        made, _ = compute_grpo_outcome_advantage(part, response_mask, index, epsilon, norm_adv_by_std_in_grpo)
        total = total + weight * made
    advantages = masked_whiten(total, response_mask) * response_mask
    return advantages, advantages


def _first_token(mask: torch.Tensor) -> torch.Tensor:
    """A mask of one token per row: where a score stands does not matter to the sum."""
    one = torch.zeros_like(mask, dtype=torch.bool)
    one[:, 0] = True
    return one


def compute_optimal_token_baseline_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    rollout_is_weights: torch.Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    **kwargs: Any,
) -> Pair:
    """Returns less a baseline per token position."""
    if rollout_is_weights is not None or not handle_zero_tail:
        raise NotImplementedError(
            "optimal_token_baseline here takes no rollout_is_weights and always leaves the tail of a group's longest "
            "response without a baseline"
        )
    return optimal_token_baseline.compute_optimal_token_baseline_advantage(
        token_level_rewards,
        response_mask,
        index,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
    )


for _name, _function in {
    "gae": compute_gae_advantage_return,
    "grpo": compute_grpo_outcome_advantage,
    "grpo_vectorized": compute_grpo_vectorized_outcome_advantage,
    "rloo_vectorized": compute_rloo_vectorized_outcome_advantage,
    "grpo_passk": compute_grpo_passk_outcome_advantage,
    "reinforce_plus_plus": compute_reinforce_plus_plus_outcome_advantage,
    "reinforce_plus_plus_baseline": compute_reinforce_plus_plus_baseline_outcome_advantage,
    "rloo": compute_rloo_outcome_advantage,
    "remax": compute_remax_outcome_advantage,
    "opo": compute_opo_outcome_advantage,
    "gpg": compute_gpg_outcome_advantage,
    "gdpo": compute_gdpo_outcome_advantage,
    "optimal_token_baseline": compute_optimal_token_baseline_advantage,
}.items():
    known_estimator(_name, _function)
