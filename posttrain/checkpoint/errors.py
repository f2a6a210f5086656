"""CheckpointError, and messages for what the operating system reports when a disk is full or read-only."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

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
