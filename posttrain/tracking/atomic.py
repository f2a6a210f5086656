"""Replacing a file in one step: a reader, and a run that is killed, see the old content or the new."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LEFT = re.compile(r"\..+\.\d+\.tmp")


def replace_file(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Make `path` hold `content`, or what `content(temporary path)` writes; after an error the old file stays."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # or else the name may reach the disk before the content
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_leftovers(*folders: Path) -> None:
    """Remove temporary files of killed processes; only for folders into which no other process writes."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if _LEFT.fullmatch(path.name):
                with suppress(OSError):
                    path.unlink()
