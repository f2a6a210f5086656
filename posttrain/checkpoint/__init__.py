"""Checkpoints: atomic save, exact resume, and the proof that a folder is complete.

`CheckpointManager` saves and loads, `verify` lists what is wrong with a folder, `capture_rng` and `restore_rng` turn
the process's random number generators into tensors and back. What needs torch is loaded on first use: to say that a
folder is no checkpoint must not cost that import.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from posttrain.checkpoint.folders import CheckpointError, verify

if TYPE_CHECKING:
    from posttrain.checkpoint.manager import CheckpointManager, capture_rng, restore_rng

_HOMES = {"CheckpointManager": "manager", "capture_rng": "manager", "restore_rng": "manager"}

__all__ = ["CheckpointError", "CheckpointManager", "capture_rng", "restore_rng", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
