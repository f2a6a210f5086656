"""The file of `posttrain bench algorithms --json`: finished runs and what they were made on, read back to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.bench.learning.training import Run
from posttrain.errors import UserError

Record = dict[str, Any]
"""`steps` of the newest call, `sessions` (circumstances of each call), `runs` (each with the number of its session)."""


def stored(path: Path | None, *, required: bool) -> Record:
    """The record so far; empty where there is no file yet."""
    if path is None or (not path.exists() and not required):
        return {"steps": 0, "sessions": [], "runs": []}
    try:
        record = json.loads(path.read_text())
        return {"steps": record["steps"], "sessions": record["sessions"], "runs": record["runs"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a file that `posttrain bench algorithms --json` wrote") from None


def as_text(record: Record) -> str:
    """The record as JSON with a line per session and per run."""
    parts = [f' "steps": {record["steps"]}']
    for key in ("sessions", "runs"):
        rows = ",\n".join(f"  {json.dumps(row)}" for row in record[key])
        parts.append(f' "{key}": [\n{rows}\n ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def take_missing(record: Record, wanted: list[Run]) -> list[Run]:
    """The runs that the record does not hold; older ones in their place, of other settings or length, are dropped."""
    missing = [run for run in wanted if not any(_same(run, kept) for kept in record["runs"])]
    replaced = {(run.entry.name, run.seed) for run in missing}
    record["runs"] = [kept for kept in record["runs"] if (kept["algorithm"], kept["seed"]) not in replaced]
    record["steps"] = wanted[0].steps
    return missing


def _same(run: Run, kept: dict[str, Any]) -> bool:
    return all(kept.get(key) == value for key, value in run.identity.items())
