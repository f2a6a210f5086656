"""verl's address of the reward manager `dapo`."""

from verl.workers.reward_manager.managers import DAPORewardManager

__all__ = ["DAPORewardManager"]
