"""Losses per token, one per file."""
