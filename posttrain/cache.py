"""The folder in which posttrain keeps what is made once per machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.errors import UserError


def cache_folder() -> Path:
    """`$POSTTRAIN_CACHE`, or `~/.cache/posttrain`; without a home folder, one below the folder of temporary files."""
    if named := os.environ.get("POSTTRAIN_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "posttrain"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"posttrain-{os.getuid()}"


@contextmanager
def writing_cache() -> Iterator[None]:
    """Around writes to the cache folder: UserError if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"The cache folder {cache_folder()} cannot be written: {error.strerror or error}. "
            "Name another one with the environment variable POSTTRAIN_CACHE, or make room in it."
        ) from error
