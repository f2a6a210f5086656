"""verl's address of the base of settings."""

from verl._config import BaseConfig
from verl._missing import not_given

__all__ = ["BaseConfig"]
__getattr__ = not_given(__name__)
