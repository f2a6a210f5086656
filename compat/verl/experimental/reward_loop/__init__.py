"""Rewards of one response at a time. In a run posttrain's own reward workers score while others are generated."""
