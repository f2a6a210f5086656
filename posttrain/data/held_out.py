"""Validation rows taken out of the training rows: `data.val_files=held_out`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from posttrain.data.rows import RowTable

SHARE, MOST, FEWEST = 10, 256, 20
"""One row of so many is held out, at most so many, and none of a table with fewer than so many rows."""


def hold_out(table: RowTable, prompt_key: str, *, most: int = -1, batch: int = 0) -> tuple[RowTable, RowTable | None]:
    """(the rows to train on, the rows to validate on or None). Which they are depends on their prompts alone.

    Rows are chosen by a hash of their prompt: neither their order nor a seed changes the choice, and rows with the same
    prompt stay on one side. `most` limits the rows held out (-1: no further limit); `batch` rows at least are left.
    """
    wanted = min(len(table) // SHARE, MOST, len(table) - batch) if len(table) >= FEWEST else 0
    wanted = wanted if most < 0 else min(wanted, most)
    prompts: dict[bytes, list[int]] = {}
    for row, values in enumerate(table.rows):
        prompts.setdefault(_key(values.get(prompt_key)), []).append(row)
    chosen: set[int] = set()
    for key in sorted(prompts):
        if len(chosen) + len(prompts[key]) <= wanted:
            chosen.update(prompts[key])
    if not chosen:
        return table, None
    return table.take(row for row in range(len(table)) if row not in chosen), table.take(sorted(chosen))


def held_out_words(train: int, val: int) -> str:
    """What a run says at its start."""
    if not val:
        return (
            f"No validation file is set (data.val_files), and {train} training rows are too few to hold some out: the "
            "run makes no validation."
        )
    return (
        f"No validation file is set (data.val_files): {val} of the {train + val} training rows are held out for "
        "validation and not trained on; the same ones every time. data.val_files=null trains on all of them."
    )


def _key(prompt: Any) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).digest()
