"""Runners of posttrain itself; they use the same protocol as the peers' scripts."""
