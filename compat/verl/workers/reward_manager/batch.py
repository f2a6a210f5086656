"""verl's address of the reward manager `batch`."""

from verl.workers.reward_manager.managers import BatchRewardManager

__all__ = ["BatchRewardManager"]
