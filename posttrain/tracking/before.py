"""before.json: what the model answered to a few held-out prompts at the first validation, kept for the end of the run.

A run that is stopped and resumed is compared with its own beginning, not with where it went on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.tracking.atomic import replace_file

NAME = "before.json"
Before = tuple[int, list[dict[str, Any]]]
"""(step, samples with `prompt`, `response` and `score`)."""


def write_before(folder: Path, step: int, samples: list[dict[str, Any]]) -> None:
    """Keep the samples of the run's first validation."""
    replace_file(folder / NAME, json.dumps({"step": step, "samples": samples}).encode())


def read_before(folder: Path) -> Before | None:
    """What was kept; None where there is nothing, or nothing readable."""
    path = folder / NAME
    try:
        known = json.loads(path.read_bytes()) if path.is_file() else {}
        samples = [{key: one[key] for key in ("prompt", "response", "score")} for one in known["samples"]]
        return int(known["step"]), samples
    except (OSError, ValueError, KeyError, TypeError):
        return None
