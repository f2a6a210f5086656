"""Where the bench keeps models, environments of peers and logs: `$POSTTRAIN_CACHE/bench`."""

from __future__ import annotations

from pathlib import Path


def bench_folder() -> Path:
    from posttrain.trainer.embedded import cache_folder

    return cache_folder() / "bench"
