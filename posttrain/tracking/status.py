"""status.json: the state of a run, for people, for `posttrain runs`, and for the next start of the same run."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.tracking.row import Moment
from posttrain.tracking.safe_files import DamagedFile, read_object, replace_file

FRESH_S = 2.0  # a running run writes its status this often
NAME = "status.json"
# Types of the values; a file may have been edited or cut off.
KINDS: dict[str, type] = {
    **dict.fromkeys(("status", "stage", "unit", "time", "host"), str),
    **dict.fromkeys(("step", "total_steps", "pid"), int),
    **dict.fromkeys(("stage_seconds", "done", "of", "tokens", "tokens_per_s"), float),
    **dict.fromkeys(("stage_seconds_left", "seconds_left"), float),
}


def write_status(folder: Path, status: str, step: int, total_steps: int, moment: Moment | None = None) -> None:
    """Write the state (`running`, `stopped`, `failed` or `finished`), the progress, the time and the process."""
    known: dict[str, Any] = {
        "status": status,
        "step": step,
        "total_steps": total_steps,
        "stage": None,
        **(_moment(moment) if moment else {}),
        # Time, process and machine let a reader tell a run that works from one that was killed and could not say so.
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "pid": os.getpid(),
        "host": platform.node(),
    }
    replace_file(folder / NAME, (json.dumps(known, ensure_ascii=False) + "\n").encode())


def read_status(folder: Path) -> dict[str, Any]:
    """What a run wrote last; empty if nothing is readable."""
    try:
        return load_status(folder)
    except DamagedFile:
        return {}


def load_status(folder: Path) -> dict[str, Any]:
    """What a run wrote last, every value of its type; empty before it wrote anything. DamagedFile if it is broken."""
    try:
        found = read_object(folder / NAME)
    except FileNotFoundError:
        return {}
    for key, kind in KINDS.items():
        value = found.get(key)
        if value is not None and not _has_type(value, kind):
            raise DamagedFile(f"{NAME}: `{key}` is {str(value)[:40]!r}, not a {'text' if kind is str else 'number'}.")
    return found


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, str) if kind is str else isinstance(value, (int, kind)) and not isinstance(value, bool)


def run_state(folder: Path) -> str:
    """The state in one word: `killed` if the process of a running run is gone, `silent` if it stopped writing."""
    known = read_status(folder)
    status = str(known.get("status", "unknown"))
    # A process id means something on its own machine only; on a shared disk the age of the file has to serve.
    if status == "running" and known.get("host") == platform.node() and not _is_alive(known.get("pid")):
        return "killed"
    if status == "running" and age(known) > 60 * FRESH_S:
        return "silent"
    return status


def age(known: dict[str, Any]) -> float:
    """Seconds since a status was written; 0 if it does not say."""
    try:
        return max(0.0, time.time() - datetime.fromisoformat(known["time"]).timestamp())
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0.0


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return True  # unknown: older versions wrote no pid
    try:
        # Signal 0 is not delivered: it only asks whether the process exists. No permission means that it does.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _moment(moment: Moment) -> dict[str, Any]:
    work = moment.work
    known: dict[str, Any] = {"stage": moment.stage, "stage_seconds": round(moment.stage_seconds, 1)}
    if work is not None:
        left = work.seconds_left
        known |= {
            "unit": work.unit,
            "done": work.shown,
            "of": work.total,
            "tokens": work.all_tokens,
            "tokens_per_s": round(work.all_tokens / max(work.seconds, 1e-9), 1),
            "stage_seconds_left": None if left is None else round(left, 1),
        }
    left = moment.seconds_left
    return known | {"seconds_left": None if left is None else round(left, 1)}
