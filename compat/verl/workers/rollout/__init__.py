"""Rollout: what agent loops read of it."""

from verl._missing import not_given

__getattr__ = not_given(__name__)
