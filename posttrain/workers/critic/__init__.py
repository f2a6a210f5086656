"""The critic's update."""
