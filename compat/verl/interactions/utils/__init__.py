"""Interactions of a file."""
