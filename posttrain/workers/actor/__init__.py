"""The policy's update."""
