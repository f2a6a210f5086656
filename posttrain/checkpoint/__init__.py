"""Checkpoints: atomic save, exact resume, and the proof that a folder is whole.

`CheckpointManager` saves and loads, `verify` lists what is wrong with a folder, `capture_rng` and `restore_rng` turn
the process's random number generators into tensors and back.
"""

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.manager import CheckpointManager
from posttrain.checkpoint.rng import capture_rng, restore_rng
from posttrain.checkpoint.verify import verify

__all__ = ["CheckpointError", "CheckpointManager", "capture_rng", "restore_rng", "verify"]
