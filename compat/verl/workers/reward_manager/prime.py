"""verl's address of the reward manager `prime`."""

from verl.workers.reward_manager.managers import PrimeRewardManager

__all__ = ["PrimeRewardManager"]
