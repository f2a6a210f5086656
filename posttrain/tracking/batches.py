"""The batches of past steps as the updates received them, for `posttrain replay`: tensors and JSON, no pickle.

batches/replay.json    the settings of the workers, adjusted to the data, and the run's updates
batches/step_N/        a saved DataProto
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.batch.fields import ROUTES
from posttrain.texts import utf8
from posttrain.tracking.safe_files import replace_file

FACTS = "replay.json"
# The columns that an update reads besides tensors, and those that identify rows.
FIELDS = ("uid", "sample", "branch", "parent", "fork", "turn_ends", "reward_score", ROUTES)
_STEP = re.compile(r"step_(\d+)")


def keep_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    replace_file(folder / FACTS, utf8(json.dumps(dict(facts), ensure_ascii=False)))


def read_facts(folder: Path) -> dict[str, Any] | None:
    path = folder / FACTS
    return json.loads(path.read_bytes()) if path.is_file() else None


def keep_batch(folder: Path, step: int, batch: Any, keep: int) -> None:
    """Write the batch of a step, all or nothing, and remove those more than `keep` steps ago (below 0: none)."""
    # Under another name until it is complete: `kept_steps` must not find half a batch after a kill.
    half = folder / f".step_{step}"
    shutil.rmtree(half, ignore_errors=True)
    present = [name for name in FIELDS if name in batch.non_tensor_batch]
    batch.select(non_tensor_batch_keys=present).save_to_disk(half)
    place = batch_folder(folder, step)
    shutil.rmtree(place, ignore_errors=True)
    # A rename does not replace a folder with content, so the one of the same step before a resume is removed first.
    half.rename(place)
    for old in kept_steps(folder):
        if keep > 0 and old <= step - keep:
            shutil.rmtree(batch_folder(folder, old), ignore_errors=True)


def drop_batches_after(folder: Path, step: int) -> None:
    """A resumed run repeats these steps."""
    for later in kept_steps(folder):
        if later > step:
            shutil.rmtree(batch_folder(folder, later), ignore_errors=True)


def kept_steps(folder: Path) -> list[int]:
    found = (_STEP.fullmatch(path.name) for path in folder.glob("step_*") if (path / "fields.json").is_file())
    return sorted(int(match[1]) for match in found if match)


def batch_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step}"
