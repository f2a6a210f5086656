"""Which directory a run is written to, and whether it continues the run that is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.tracking.rundir import RunDirectory, RunDirectoryError
from posttrain.tracking.status import read_status

Say = Callable[[str], object]


def open_run_directory(config: Any, say: Say, *, stem: str | None = None) -> tuple[RunDirectory, bool]:
    """The opened directory, and whether the run in it goes on. Never mixes two runs.

    `stem` begins the names of runs that have none of their own; null takes the estimator's name.
    """
    stem = stem or re.sub(r"[^A-Za-z0-9_.-]", "_", config.algorithm.adv_estimator)
    trainer = config.trainer
    root = Path(trainer.default_local_dir)
    if trainer.experiment_name is not None:
        run = RunDirectory(root, trainer.project_name, trainer.experiment_name, on_note=say).open()
        return run, _check_continues(run, config, say)
    number = _newest_run(root / trainer.project_name, stem)
    if number and trainer.resume_mode == "auto":
        run = RunDirectory(root, trainer.project_name, f"{stem}-{number}", on_note=say)
        if not _is_finished(run, config) and not run.changed_settings(config.to_dict()):
            run.open()
            say(f"Continuing the unfinished run {run.path} (the settings are the same).")
            return run, _check_continues(run, config, say)
    run = RunDirectory(root, trainer.project_name, f"{stem}-{number + 1}", on_note=say)
    return run.open(), False


def _newest_run(folder: Path, stem: str) -> int:
    """The largest number of a run that made it to its first step: one that failed before left nothing to go on from,
    and must not stand between an unfinished run and the command that continues it."""
    begun = (path.parent.name for path in folder.glob(f"{stem}-*/config.yaml"))
    found = [re.fullmatch(rf"{re.escape(stem)}-(\d+)", name) for name in begun]
    return max((int(match[1]) for match in found if match), default=0)


def _check_continues(run: RunDirectory, config: Any, say: Say) -> bool:
    if not run.holds_run():
        return False
    if config.trainer.resume_mode == "disable":
        run.close()
        raise RunDirectoryError(
            f"{run.path} holds a run already and trainer.resume_mode=disable. Choose another trainer.experiment_name, "
            "set trainer.resume_mode=auto to continue it, or move the folder away."
        )
    given = config.trainer.resume_from_path if config.trainer.resume_mode == "resume_path" else None
    if given and run.checkpoints.resolve() not in Path(given).resolve().parents:
        run.close()
        raise RunDirectoryError(
            f"{run.path} holds a run already, and trainer.resume_from_path={given} belongs to another one. Choose a "
            "new trainer.experiment_name for the run that branches off."
        )
    for key, old, new in run.changed_settings(config.to_dict()):
        say(f"Changed since this run was started: {key} was {old}, is now {new}.")
    return True


def _is_finished(run: RunDirectory, config: Any) -> bool:
    status = read_status(run.path)
    wanted = config.trainer.total_training_steps or 0
    return status.get("status") == "finished" and wanted <= int(status.get("total_steps", 0))
