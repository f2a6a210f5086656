"""Helpers of workers."""
