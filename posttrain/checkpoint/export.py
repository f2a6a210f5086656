"""export: the Hugging Face folder of a checkpoint, copied out after a check of every file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from posttrain.checkpoint.errors import CheckpointError
from posttrain.checkpoint.folders import steps_in
from posttrain.checkpoint.verify import MANIFEST, read_manifest, verify

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
    """CheckpointError if this is no checkpoint: not there, not whole, or the folder of a run."""
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
