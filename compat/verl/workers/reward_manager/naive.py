"""verl's address of the reward manager `naive`."""

from verl._missing import not_given
from verl.workers.reward_manager.managers import NaiveRewardManager

__all__ = ["NaiveRewardManager"]
__getattr__ = not_given(__name__)
