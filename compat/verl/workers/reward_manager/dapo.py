"""verl's address of the reward manager `dapo`."""

from verl._missing import not_given
from verl.workers.reward_manager.managers import DAPORewardManager

__all__ = ["DAPORewardManager"]
__getattr__ = not_given(__name__)
