"""The names of verl's Megatron workers: scripts import them for a strategy that is not built; made, they say so."""

from typing import Any

from verl._instead import INSTEAD
from verl._missing import not_given

__getattr__ = not_given(__name__)


class _NotBuilt:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} on Megatron: {INSTEAD['verl.workers.megatron_workers']} Set "
            "actor_rollout_ref.actor.strategy=fsdp2 (and critic.strategy, reward_model.strategy)."
        )


class ActorRolloutRefWorker(_NotBuilt):
    """verl's Megatron worker of actor, rollout and reference."""


class AsyncActorRolloutRefWorker(_NotBuilt):
    """The same with an engine that runs by itself."""


class CriticWorker(_NotBuilt):
    """verl's Megatron critic."""


class RewardModelWorker(_NotBuilt):
    """verl's Megatron reward model."""
