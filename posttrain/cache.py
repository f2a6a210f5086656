"""The folder in which posttrain keeps what is made once per machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$POSTTRAIN_CACHE`, or `~/.cache/posttrain`."""
    return Path(os.environ.get("POSTTRAIN_CACHE") or Path.home() / ".cache" / "posttrain")
