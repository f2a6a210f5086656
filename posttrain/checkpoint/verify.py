"""`manifest.json`: the list of a checkpoint's files with sizes and hashes, and the check against it.

The manifest covers itself as well: `sha256` is the hash of all its other entries, so that a changed `step` or `metric`
is noticed like a changed file. Format 1 had no such hash and is still read.

`export` copies the Hugging Face folder out of a checkpoint after that check.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.folders import files_below, sha256_of_all, steps_in, write_synced

MANIFEST = "manifest.json"
FORMAT = 2
_OLDER = 1
_STEP = re.compile(r"global_step_(\d+)")


def write_manifest(folder: Path, *, step: int, metric: float | None) -> None:
    """List what lies in `folder`; written last, so that a folder with a manifest was complete."""
    paths = files_below(folder)
    hashes = sha256_of_all(paths)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, hashes, strict=True)
    }
    manifest = {"format": FORMAT, "step": step, "metric": metric, "files": files}
    manifest["sha256"] = _own_hash(manifest)
    write_synced(folder / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; a ValueError says what is wrong with it."""
    try:
        manifest = json.loads(_read_plain(folder / MANIFEST))
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: the checkpoint was not completed") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") not in (FORMAT, _OLDER):
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if not isinstance(manifest.get("step"), int) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST} does not name its step and files")
    if manifest["format"] == FORMAT and manifest.get("sha256") != _own_hash(manifest):
        raise ValueError(f"{MANIFEST} is not as it was written (sha256)")
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest["step"]:
        raise ValueError(f"{MANIFEST} is that of step {manifest['step']}: the folder was renamed, or the file copied")
    return manifest


def _own_hash(manifest: dict[str, Any]) -> str:
    entries = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _read_plain(path: Path) -> bytes:
    # Anything but a plain file is an OSError: reading a pipe would block for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no plain file")
    return path.read_bytes()


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
        found = (folder / name).stat()
    except OSError:
        return "is missing"
    if not stat.S_ISREG(found.st_mode):
        return "is no plain file"
    size = found.st_size
    return None if size == entry["size"] else f"has {size} bytes instead of {entry['size']}"


HUGGINGFACE = "huggingface"


def free_folder(target: Path) -> None:
    """Refuses a folder that holds something already."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} is not empty; name a new folder.")


def export(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Copy the model that a run wrote into `checkpoint` (`.../global_step_N`) to the new folder `out`."""
    source, target = Path(checkpoint), Path(out)
    problems = verify(source)
    if problems:
        raise CheckpointError(f"The checkpoint {source} is damaged and is not exported: {problems[0]}.")
    names = [name for name in read_manifest(source)["files"] if name.startswith(f"{HUGGINGFACE}/")]
    if not names:
        raise CheckpointError(
            f"The checkpoint {source} holds no Hugging Face model. A run writes one into its last checkpoint, and into "
            "every one with trainer.export_hf=all: resume the run with that setting, or name its last checkpoint."
        )
    free_folder(target)
    for name in names:
        copy = target / name.removeprefix(f"{HUGGINGFACE}/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, copy)
    return target


def refuse_other_folders(path: Path) -> None:
    """CheckpointError if this is no checkpoint: missing, incomplete, or the folder of a run."""
    refuse_run(path)
    if not (path / MANIFEST).is_file():
        what = f"is no whole checkpoint: it has no {MANIFEST}" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}. Name a folder .../checkpoints/global_step_N.")


def refuse_run(path: Path) -> None:
    """CheckpointError if this is the folder of a run, where one of its checkpoints belongs."""
    folder = path / "checkpoints"
    if folder.is_dir() and (path / "config.yaml").is_file():
        steps = steps_in(folder)
        hint = f", such as {folder / f'global_step_{steps[-1]}'}" if steps else " (it holds none)"
        raise CheckpointError(f"{path} is the folder of a run; name one of its checkpoints{hint}.")
