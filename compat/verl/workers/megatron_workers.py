"""verl's Megatron workers: the same as those of FSDP, since `actor_rollout_ref.actor.strategy` chooses the engine in
them. A reward model is cut by FSDP."""

from verl.workers.fsdp_workers import (
    ActorRolloutRefWorker,
    AsyncActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
)

__all__ = ["ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
