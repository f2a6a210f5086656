"""Small files with one JSON object per step: diagnosis.jsonl (the step's line and advice) and timeline.jsonl (when each
stage began and how long it took)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.texts import utf8
from posttrain.tracking.stored import DamagedFile, stored_lines

DIAGNOSIS, TIMELINE = "diagnosis.jsonl", "timeline.jsonl"


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One more line. What is lost with a killed process is written again when its steps are made again."""
    with path.open("ab") as file:
        file.write(utf8(json.dumps(line, ensure_ascii=False)) + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines up to one that cannot be read as any, none where there is no file."""
    with suppress(FileNotFoundError, DamagedFile):
        for line in stored_lines(path):
            found = None
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
            if isinstance(found, dict):
                yield found
