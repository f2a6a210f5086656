"""`manifest.json`: the list of a checkpoint's files with sizes and hashes, and the check against it."""

from __future__ import annotations

import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.checkpoint.files import files_below, sha256_of_all, write_synced

MANIFEST = "manifest.json"
FORMAT = 1


def write_manifest(folder: Path, *, step: int, metric: float | None) -> None:
    """List what lies in `folder`; written last, so that a folder with a manifest was complete."""
    paths = files_below(folder)
    hashes = sha256_of_all(paths)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    manifest = {"format": FORMAT, "step": step, "metric": metric, "files": files}
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; a ValueError says what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: the checkpoint was not completed") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} does not name its step and files")
    return manifest


def verify(path: str | os.PathLike[str]) -> list[str]:
    """What is wrong with the checkpoint folder `path`; an empty list means that every listed file is as it was written.

    Files that the manifest does not list are no problem: they are never loaded.
    """
    folder = Path(path)
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return [str(error)]
    problems, present = [], {}
    for name, entry in files.items():
        problem = _problem_of(folder, name, entry)
        if problem:
            problems.append(f"{name}: {problem}")
        else:
            present[name] = entry["sha256"]
    try:
        hashes = sha256_of_all([folder / name for name in present])
    except OSError as error:
        return [*problems, f"cannot be read: {error}"]
    wrong = [name for name, digest in zip(present, hashes, strict=True) if digest != present[name]]
    return problems + [f"{name}: its content differs from what was written (sha256)" for name in wrong]


def _problem_of(folder: Path, name: str, entry: Any) -> str | None:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute():
        return "the name leads out of the checkpoint"
    if not isinstance(entry, dict) or not {"size", "sha256"} <= entry.keys():
        return "has no size and hash in the manifest"
    try:
        size = (folder / name).stat().st_size
    except OSError:
        return "is missing"
    return None if size == entry["size"] else f"has {size} bytes instead of {entry['size']}"
