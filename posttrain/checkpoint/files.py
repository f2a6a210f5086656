"""Writing that survives a power cut, and hashes: fsync of files, of folders and of whole trees, sha256."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from posttrain import cores


def write_synced(path: Path, data: bytes) -> None:
    """Write `path` and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def files_below(folder: Path) -> list[Path]:
    """All files below `folder`, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync_tree(folder: Path) -> None:
    """Wait until every file and every name below `folder` is on the disk."""
    for path in [*files_below(folder), folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: list[Path]) -> list[str]:
    """One hash per path; several files at a time, as hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=min(8, cores.usable())) as pool:
        return list(pool.map(sha256_of, paths))
