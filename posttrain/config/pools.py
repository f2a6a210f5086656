"""Roles of an RL run that may have workers of their own, beside those that train: one line for each.

A role is a name, a worker class (`trainer/ppo/parts.py`) and a pool of processes. Without workers of its own it is on
every worker that trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.algorithms.registry import critic_estimators
from posttrain.config.schema import lookup

ROLLOUT_WORKERS = "actor_rollout_ref.rollout.n_workers"
REWARD_MODEL_WORKERS = "reward_model.n_workers"
CRITIC_WORKERS = "critic.n_workers"
REFERENCE_WORKERS = "actor_rollout_ref.ref.n_workers"


def needs_reference(config: Any) -> bool:
    """Whether a run needs the frozen reference policy: KL in the reward, or in the loss with a coefficient above 0."""
    actor = config.actor_rollout_ref.actor
    return config.algorithm.use_kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef != 0)


def needs_critic(config: Any) -> bool:
    """Whether the estimator needs values."""
    return config.algorithm.adv_estimator in critic_estimators()


@dataclass(frozen=True)
class OwnWorkers:
    """A role that may have workers of its own: as many as the setting `key` says, where `is_used` holds."""

    key: str
    is_used: Callable[[Any], bool]
    # Whether its workers hold one model together, cut over them; otherwise each has a whole one.
    shards: bool = False


ROLES: dict[str, OwnWorkers] = {
    "rollout": OwnWorkers(ROLLOUT_WORKERS, lambda config: True),
    "reward_model": OwnWorkers(REWARD_MODEL_WORKERS, lambda config: config.reward_model.enable),
    "critic": OwnWorkers(CRITIC_WORKERS, needs_critic, shards=True),
    "reference": OwnWorkers(REFERENCE_WORKERS, needs_reference, shards=True),
}
"""By the name that `TrainingGroups` gives the role."""


def own_workers_of(config: Any) -> dict[str, int]:
    """Roles of this run with workers of their own, and how many; none in supervised runs."""
    if not hasattr(config, "actor_rollout_ref"):
        return {}
    found = {role: lookup(config, own.key) for role, own in ROLES.items() if own.is_used(config)}
    return {role: count for role, count in found.items() if count}
