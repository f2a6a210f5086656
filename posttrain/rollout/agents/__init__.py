"""Agents: conversations that a user's own function leads, above any rollout engine."""
