"""verl's address of the actor's settings; the strategy in them chooses the engine."""

from verl.workers.config import ActorConfig, FSDPActorConfig, McoreActorConfig, PolicyLossConfig

__all__ = ["ActorConfig", "FSDPActorConfig", "McoreActorConfig", "PolicyLossConfig"]
