"""Runners of other systems. Each is a script for another environment and imports nothing of posttrain."""
