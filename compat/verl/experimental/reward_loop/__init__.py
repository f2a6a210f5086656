"""Rewards of one response at a time. In a run posttrain's own reward workers score while others are generated."""

from verl._missing import not_given

__getattr__ = not_given(__name__)
