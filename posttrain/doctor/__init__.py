"""Checks before a run: the memory plan."""
