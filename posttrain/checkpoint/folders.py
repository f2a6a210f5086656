"""Checkpoint folders that are complete or absent, whenever a process is killed or the power fails; and hashes of files.

A checkpoint is written into a temporary folder beside its place, synced, and renamed. A process killed at any moment
leaves the checkpoints that were complete, and at most a temporary folder, which the next start removes.

`manifest.json` lists the files of a checkpoint with sizes and hashes, and `verify` checks a folder against it. The
manifest covers itself as well: `sha256` is the hash of all its other entries, so that a changed `step` or `metric` is
noticed like a changed file. Format 1 had no such hash and is still read. `export` copies the Hugging Face folder out of
a checkpoint after that check.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from posttrain import cores
from posttrain.errors import UserError


class CheckpointError(UserError):
    """A checkpoint could not be written or must not be loaded; the text says what to do."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_GONE = {errno.ENOENT, errno.ESTALE}
_ANEW = "The same command continues from the newest checkpoint that is left there, or begins anew."


def write_failure(target: Path, error: BaseException, needed_bytes: int) -> CheckpointError:
    """A `CheckpointError` for `error` while writing `target`; the system's own error is found below wrappers."""
    system = find_os_error(error)
    if system is None:
        return CheckpointError(f"Writing the checkpoint {target} failed: {type(error).__name__}: {error}")
    if system.errno in _FULL:
        advice = (
            f"There is no room for it: {f'about {_gib(needed_bytes)} GiB are needed, ' * bool(needed_bytes)}"
            f"{_free(target)} are free. Make room, "
            "set trainer.max_ckpt_to_keep lower, or put the run elsewhere with trainer.default_local_dir"
        )
    elif system.errno in _CLOSED:
        advice = "The folder cannot be written to. Change its permissions, or set trainer.default_local_dir"
    else:
        advice = "Check that the folder and its disk are in order, or set trainer.default_local_dir"
    reason = system.strerror or str(system)
    return CheckpointError(
        f"Writing the checkpoint {target} failed: {reason}. {advice}. Earlier checkpoints are untouched; "
        "the same command continues from the newest."
    )


def disk_words(error: OSError, folder: Path) -> str | None:
    """What to tell about a full or closed disk, or about a file that was taken away, under a run's `folder`, with the
    way back; None for other errors."""
    if error.errno not in _FULL | _CLOSED | _GONE:
        return None
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    if named is not None and folder not in named.parents and named != folder:
        return None  # a file that is not the run's
    if error.errno in _GONE:
        return None if named is None else f"{named} was deleted or moved while the run wrote into {folder}. {_ANEW}"
    what = f"Writing {named or f'into {folder}'} failed: {error.strerror}."
    if error.errno in _FULL:
        advice = f"{_free(folder / 'x')} are free. Make room (tracking.samples_max_gb, trainer.max_ckpt_to_keep)"
    else:
        advice = "Change the folder's permissions"
    return f"{what} {advice}, then the same command continues from the newest checkpoint."


def find_os_error(error: BaseException) -> OSError | None:
    """The operating system's error that `error` is, wraps or was raised from."""
    found = find_error(error, OSError)
    return found if isinstance(found, OSError) else None


def find_error(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The error of a kind that `error` is, wraps or was raised from."""
    pending, seen = [error], set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, kind):
            return current
        # torch.distributed.checkpoint hands over one (exception, stack) pair per rank.
        pending += [pair[0] for pair in getattr(current, "failures", {}).values()]
        pending += [linked for linked in (current.__cause__, current.__context__) if linked is not None]
    return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f}"


def _free(target: Path) -> str:
    try:
        return _gib(shutil.disk_usage(target.parent).free) + " GiB"
    except OSError:
        return "an unknown number"


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


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder; 0 where its name does not say it."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else 0


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


MANIFEST = "manifest.json"
FORMAT = 2
_OLDER = 1
_STEP = re.compile(r"global_step_(\d+)")


Entries = dict[str, dict[str, Any]]  # what a manifest says of each file: its size and hash


def write_manifest(folder: Path, *, step: int, metric: float | None, known: Entries | None = None) -> None:
    """List what lies in `folder`; written last, so that a folder with a manifest was complete.

    `known` are entries of files that were hashed while they were written; the others are read for it.
    """
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files_below(folder)}
    known = known or {}
    for name, entry in known.items():
        if sizes.get(name) != entry["size"]:
            raise OSError(errno.EIO, f"{name} has {sizes.get(name, 'no')} bytes, but {entry['size']} were written")
    others = [name for name in sizes if name not in known]
    hashes = dict(zip(others, sha256_of_all([folder / name for name in others]), strict=True))
    files = {name: known.get(name) or {"size": size, "sha256": hashes[name]} for name, size in sizes.items()}
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
