"""`posttrain explain NAME`; each page says what an algorithm, setting or metric is, and what to make of it."""

from posttrain.explain.pages import explain

__all__ = ["explain"]
