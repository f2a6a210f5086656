"""Rollout: tokens out. The engine contract, the engines behind it, and batch generation above it."""
