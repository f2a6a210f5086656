"""verl's address of the rollout's settings."""

from verl._missing import not_given
from verl.workers.config import RolloutConfig

__all__ = ["RolloutConfig"]
__getattr__ = not_given(__name__)
