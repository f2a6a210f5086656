"""verl's address of the reward manager `naive`."""

from verl.workers.reward_manager.managers import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
