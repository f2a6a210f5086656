"""Replacing a file in one step: a reader, and a run that is killed, see the old content or the new."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Make `path` hold `content`, or what `content(temporary path)` writes; after an error the old file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
