"""verl's address of the base of settings."""

from verl._config import BaseConfig

__all__ = ["BaseConfig"]
