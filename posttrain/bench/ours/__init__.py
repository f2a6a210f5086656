"""Runners of posttrain itself; they speak with the bench as the peers' scripts do."""
