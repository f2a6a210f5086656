"""Run directories on disk: all of them, or the one that a user names."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from posttrain.errors import UserError

_FILES = ("metrics.jsonl", "config.yaml")
ROOT = "outputs"
"""Where runs lie unless trainer.default_local_dir says otherwise."""


class NoSuchRun(UserError):
    """There is no run of that name; the text says where it was looked for."""


def is_run(folder: Path) -> bool:
    """Whether a run was written here; a link that leads nowhere in place of its files makes it a damaged one."""
    return any(os.path.lexists(folder / name) for name in _FILES)


def runs_under(root: str | os.PathLike[str]) -> list[Path]:
    """Runs in `root` and in its projects, oldest first."""
    folders = [*Path(root).glob("*/*"), *Path(root).glob("*")]
    found = {os.path.realpath(folder): folder for folder in folders if os.path.isdir(folder) and is_run(folder)}
    return sorted(found.values(), key=_changed)


def find_run(name: str, root: str | os.PathLike[str] = ROOT) -> Path:
    """The folder of a run: a path, or the end of one below `root` (`grpo-1`, `embedded/grpo-1`)."""
    if is_run(Path(name)):
        return Path(name)
    wanted = Path(name).parts
    fitting = [folder for folder in runs_under(root) if folder.parts[-len(wanted) :] == wanted]
    if fitting:
        return fitting[-1]
    known = [str(folder) for folder in runs_under(root)[-5:]]
    where = f"Runs in {root}/: {', '.join(reversed(known))}." if known else f"There is no run in {root}/ either."
    what = f"The folder {name} holds no run" if Path(name).is_dir() else f"There is no run `{name}`"
    raise NoSuchRun(f"{what}. Give the path of its folder, or its name. {where}")


def _changed(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for name in _FILES:
        with suppress(OSError):  # absent, removed a moment ago, or a link that leads nowhere
            times.append((folder / name).stat().st_mtime)
    return max(times), str(folder)
