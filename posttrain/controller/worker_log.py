"""`workers.log`: what the processes of a run's workers printed, kept with the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NAME = "workers.log"


def lines_of(files: Sequence[str]) -> list[str]:
    """What a worker has printed to these files of Ray, without Ray's own marks."""
    lines: list[str] = []
    for file in files:
        with suppress(OSError):
            lines += Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line and not line.startswith((":job_id:", ":actor_name:"))]


def keep(lines: Sequence[str], title: str, folder: Path) -> Path | None:
    """Adds the lines to the log in `folder`, and gives its path; None where nothing was, or could be, written."""
    if not lines:
        return None
    path = folder / NAME
    try:
        with path.open("a", encoding="utf-8") as log:
            log.write("\n".join([f"--- {title}", *lines]) + "\n")
    except OSError:
        return None
    return path
