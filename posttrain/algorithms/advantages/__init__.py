"""Advantage estimators, one per file."""
