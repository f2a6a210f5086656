"""`posttrain bench`: the same work here and in peer systems, each in its own process; what every algorithm learns."""

from __future__ import annotations

from pathlib import Path

from posttrain.cache import cache_folder


def bench_folder() -> Path:
    """Where models, environments of peers and logs are kept: `$POSTTRAIN_CACHE/bench`."""
    return cache_folder() / "bench"
