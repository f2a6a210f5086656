"""The newest checkpoint of a folder: verl's (named by its tracker file) or posttrain's (named by their manifests)."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path


def find_latest_ckpt_path(path: str | None, directory_format: str = "global_step_{}") -> str | None:
    """The folder of the newest checkpoint, or None."""
    if path is None:
        return None
    tracker = get_checkpoint_tracker_filename(path)
    if os.path.exists(tracker):
        found = os.path.join(path, directory_format.format(int(Path(tracker).read_text())))
        return found if os.path.exists(found) else None
    whole = [file.parent for file in Path(path).glob(f"{directory_format.format('*')}/manifest.json")]
    return str(max(whole, key=_step)) if whole else None


def _step(folder: Path) -> int:
    return int(re.findall(r"\d+", folder.name)[-1])


def get_checkpoint_tracker_filename(root_path: str) -> str:
    return os.path.join(root_path, "latest_checkpointed_iteration.txt")


def should_save_ckpt_esi(max_steps_duration: float, save_ckpt_duration: float = 60, redundant_time: float = 0) -> bool:
    """Whether the machine is taken away before another step and a checkpoint would be done, as its cloud announces."""
    names = ("MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")
    ends = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if ends is None or max_steps_duration <= 0:
        return False
    return 0 < float(ends) - time.time() <= save_ckpt_duration + max_steps_duration + redundant_time
