"""Rows of a parquet, json or jsonl file as plain dicts, without torch: what `posttrain reward try` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.rewards.types import RewardError


def read_rows(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` rows of a file; RewardError says what is wrong with it."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise RewardError(f"data file {path} does not exist", todo="give a parquet, json or jsonl file")
    try:
        rows = _parquet(path, limit) if path.suffix == ".parquet" else _json(path, limit)
    except (ValueError, OSError, RecursionError) as error:
        raise RewardError(
            f"data file {path} cannot be read: {error}", todo="give a parquet, json or jsonl file"
        ) from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RewardError(f"data file {path} holds no rows", todo="write one JSON object per row")
    return rows


def _parquet(path: Path, limit: int | None) -> list[dict[str, Any]]:
    import pyarrow.parquet

    rows: list[dict[str, Any]] = []
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            rows += batch.to_pylist()
            if limit is not None and len(rows) >= limit:
                break
    return rows[:limit]


def _json(path: Path, limit: int | None) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)[:limit]
    return [json.loads(line) for line in text.splitlines() if line.strip()][:limit]
