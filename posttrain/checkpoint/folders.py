"""Checkpoint folders that are complete or absent, whenever a process is killed or the power fails; and hashes of files.

A checkpoint is written into a temporary folder beside its place, synced, and renamed. A process killed at any moment
leaves the checkpoints that were complete, and at most a temporary folder, which the next start removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from posttrain import cores


def write_synced(path: Path, data: bytes) -> None:
    """Write `path` and wait until it is on the disk."""
    # Not through a temporary name: the folder around it is temporary itself.
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
    # Folders too: fsync of a file does not write its name, which is part of the folder.
    for path in [*files_below(folder), folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_all(paths: list[Path]) -> list[str]:
    """One hash per path; several files at a time, as hashing releases the interpreter's lock."""
    with ThreadPoolExecutor(max_workers=min(8, cores.usable())) as pool:
        return list(pool.map(sha256_of, paths))


_WRITING = ".writing-"
_REPLACED = ".replaced-"
_NAME = re.compile(r"global_step_(\d+)")


def steps_in(folder: Path) -> list[int]:
    """Steps of all checkpoints in the folder, oldest first, complete or not."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def free_name(path: Path) -> Path:
    """The path, or one with a number behind it where that is taken."""
    count = 1
    free = path
    while free.exists():
        count += 1
        free = path.with_name(f"{path.name}_{count}")
    return free


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A new folder to be written in, then put in the target's place; removed if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is one step only within a file system.
    folder = target.parent / f"{_WRITING}{target.name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lock = os.open(folder, os.O_RDONLY)
    try:
        _try_lock(lock)  # held as long as the writer lives: other processes leave the folder alone
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def put_in_place(folder: Path, target: Path) -> None:
    """The folder, which is complete, becomes the target, be there one already or not."""
    aside = target.parent / f"{_REPLACED}{target.name}"
    replaces = target.exists()  # the same step again, after a resume from an earlier one
    if replaces:  # two renames: the system cannot replace a folder that is not empty in one step
        os.rename(target, aside)
    try:
        os.rename(folder, target)
    except OSError:
        if replaces:
            os.rename(aside, target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """OSError if it stays. Renamed first: killed halfway, this leaves no half checkpoint under a good name."""
    doomed = path.with_name(f"{_WRITING}{path.name}-removed")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(folder: Path) -> None:
    """Put right what processes that were killed have left; what a living one writes stays."""
    if not folder.is_dir():
        return
    for path in folder.glob(f"{_REPLACED}*"):
        original = folder / path.name.removeprefix(_REPLACED)
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:  # killed between the two renames of `put_in_place`
            os.rename(path, original)
    for path in folder.glob(f"{_WRITING}*"):
        if not _has_living_writer(path):
            shutil.rmtree(path, ignore_errors=True)


def _try_lock(descriptor: int) -> bool:
    try:  # the kernel frees it when the writer ends, however it ends
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks on folders; the run directory's own lock must serve there
    return True


def _has_living_writer(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)
