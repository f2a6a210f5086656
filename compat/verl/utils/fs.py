"""A local copy of what a path names."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from typing import Any

from verl.utils.hdfs_io import _is_non_local, copy


def is_non_local(path: str) -> bool:
    """Whether it is on HDFS."""
    return _is_non_local(path)


def md5_encode(path: str) -> str:
    return hashlib.md5(path.encode()).hexdigest()


def get_local_temp_path(hdfs_path: str, cache_dir: str) -> str:
    """Where a copy of it lies: a folder of its own in the cache, which is made."""
    folder = os.path.join(cache_dir, md5_encode(hdfs_path))
    os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, os.path.basename(hdfs_path))


def verify_copy(src: str, dest: str) -> bool:
    """Whether the copy has the same files and folders, files of the same sizes."""
    return os.path.exists(src) and os.path.exists(dest) and _contents(src) == _contents(dest)


def _contents(path: str) -> dict[str, int]:
    """Path inside of it -> the file's size, or -1 for a folder."""
    if os.path.isfile(path):
        return {"": os.path.getsize(path)}
    found = {".": -1}
    for folder, folders, files in os.walk(path):
        inside = os.path.relpath(folder, path)
        found |= {os.path.join(inside, name): -1 for name in folders}
        found |= {os.path.join(inside, name): os.path.getsize(os.path.join(folder, name)) for name in files}
    return found


_RECORD = ".directory_record.txt"


def _record_directory_structure(folder_path: str) -> str:
    """Writes the names of all files and folders into a file inside of it, and gives its path."""
    record = os.path.join(folder_path, _RECORD)
    names = sorted(_names(folder_path))
    with open(record, "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in names)
    return record


def _check_directory_structure(folder_path: str, record_file: str) -> bool:
    """Whether the folder has what its record names, and nothing else."""
    if not os.path.exists(record_file):
        return False
    with open(record_file, encoding="utf-8") as file:
        return set(file.read().splitlines()) == _names(folder_path)


def _names(path: str) -> set[str]:
    found = _contents(path)
    return {f"{'dir' if size < 0 else 'file'}:{os.path.normpath(name)}" for name, size in found.items()} - {
        "dir:.",
        f"file:{_RECORD}",
    }


def copy_to_local(
    src: str | None,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str | None:
    """A local path as it is (also a model's name on the hub); of a path on HDFS its copy, which is made once; None for
    no path.

    `use_shm` puts a copy into /dev/shm, where several processes read it from memory.
    """
    if not src:
        return None
    assert not src.endswith("/"), f"{src}: leave the slash at its end away"
    path = src
    if is_non_local(src):
        path = _fetched(src, cache_dir or tempfile.gettempdir(), verbose, always_recopy)
    return copy_to_shm(path) if use_shm and os.path.exists(path) else path


copy_local_path_from_hdfs = copy_to_local


def _fetched(src: str, cache_dir: str, verbose: bool, again: bool) -> str:
    from filelock import FileLock

    os.makedirs(cache_dir, exist_ok=True)
    with FileLock(os.path.join(cache_dir, f"{md5_encode(src)}.lock")):
        path = get_local_temp_path(src, cache_dir)
        if again and os.path.exists(path):
            _remove(path)
        if not os.path.exists(path):
            if verbose:
                print(f"Copy from {src} to {path}")
            part = f"{path}.part"  # what broke off is not taken for the whole
            _remove(part)
            copy(src, part)
            if not os.path.exists(part):
                raise OSError(f"{src} could not be copied to {part}")
            os.rename(part, path)
    return path


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.exists(path):
        os.remove(path)


def copy_to_shm(src: str) -> str:
    """A copy in /dev/shm."""
    source = os.path.abspath(src)
    target = get_local_temp_path(source, "/dev/shm/verl-cache")
    if not os.path.exists(target):
        copy(source, target)
    return target


def local_mkdir_safe(path: Any) -> str:
    """Makes the folder, also where another process does so at the same time; gives its absolute path."""
    path = os.path.abspath(path)
    os.makedirs(path, exist_ok=True)
    return path
