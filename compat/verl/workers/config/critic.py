"""verl's address of the critic's settings."""

from verl._missing import not_given
from verl.workers.config import CriticConfig

__all__ = ["CriticConfig"]
__getattr__ = not_given(__name__)
