"""verl's address of the reward manager `batch`."""

from verl._missing import not_given
from verl.workers.reward_manager.managers import BatchRewardManager

__all__ = ["BatchRewardManager"]
__getattr__ = not_given(__name__)
