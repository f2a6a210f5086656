"""Checkpoints: atomic save, exact resume, and the proof that a folder is complete.

`CheckpointManager` saves and loads, `verify` lists what is wrong with a folder, `capture_rng` and `restore_rng` turn
the process's random number generators into tensors and back. What needs torch is loaded on first use: to say that a
folder is no checkpoint must not cost that import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.checkpoint.folders import CheckpointError, verify
from posttrain.lazy import lazy_names

if TYPE_CHECKING:
    from posttrain.checkpoint.manager import CheckpointManager, capture_rng, restore_rng

__all__ = ["CheckpointError", "CheckpointManager", "capture_rng", "restore_rng", "verify"]
__getattr__ = lazy_names(__name__, manager="CheckpointManager capture_rng restore_rng")
