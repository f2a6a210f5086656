"""verl's address of the reward manager `prime`."""

from verl._missing import not_given
from verl.workers.reward_manager.managers import PrimeRewardManager

__all__ = ["PrimeRewardManager"]
__getattr__ = not_given(__name__)
