"""posttrain's workers of one process: actor, rollout and reference together, the critic, the reward model.

They take posttrain's arguments: a training makes them itself. A subclass in `role_worker_mapping` takes their place.
"""

from posttrain.workers.fsdp_workers import (
    ActorRolloutRefWorker,
    AsyncActorRolloutRefWorker,
    CriticWorker,
    RewardModelWorker,
)

__all__ = ["ActorRolloutRefWorker", "AsyncActorRolloutRefWorker", "CriticWorker", "RewardModelWorker"]
