"""Rollout: what agent loops read of it."""
