"""One file of samples: its columns, and single rows without reading the others.

Columns that older versions did not write are computed from others, or empty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from posttrain.tracking.safe_files import is_plain

MOST_ROWS = 4_000_000  # responses of one step
pc: Any = pyarrow.compute  # its functions are created at run time, unseen by type checkers
LIGHT = ("uid", "sample", "score", "length", "advantage", "mismatch", "finish_reason", "error", "data_row")
TEXTS = (
    "prompt",
    "response",
    "ground_truth",
    "data_source",
    "extra_info",
    "sampling",
    "reward_parts",
    "policy_versions",
)
TOKENS = (
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "new_log_probs",
    "ref_log_probs",
    "advantages",
    "entropy",
)


class SampleFile:
    """A step's responses. Opening reads the file's footer alone."""

    def __init__(self, path: Path) -> None:
        if not is_plain(path):  # opening a named pipe would wait forever
            raise FileNotFoundError(f"{path.name} is not a file")
        self._file, self._lock = pq.ParquetFile(path, memory_map=True), threading.Lock()
        self._uids: Any = None
        self.names = set(self._file.schema_arrow.names)
        self.rows = self._file.metadata.num_rows
        if self.rows > MOST_ROWS:  # a few bytes of parquet can encode any number of equal rows
            raise pa.ArrowInvalid(f"{path.name} holds {self.rows:,} responses; at most {MOST_ROWS:,} are read")

    def columns(self, names: Iterable[str], groups: list[int] | None = None) -> pa.Table:
        """These columns, of all rows or of some row groups; absent ones are null."""
        names = list(names)
        made_of = {name: _MADE[name][0] for name in names if name in _MADE and name not in self.names}
        sources = [source for needed in made_of.values() for source in needed]
        wanted = [name for name in dict.fromkeys([*names, *sources]) if name in self.names]
        with self._lock:  # requests in several threads may read the same file
            if groups is None:
                table = self._file.read(columns=wanted, use_threads=False)
            else:
                table = self._file.read_row_groups(groups, columns=wanted, use_threads=False)
        found = {name: table[name] for name in names if name in self.names}
        for name, needed in made_of.items():
            if set(needed) <= self.names:
                found[name] = _MADE[name][1](*(table[source].combine_chunks() for source in needed))
        return pa.table({name: found.get(name, pa.nulls(len(table))) for name in names})

    def rows_of(self, uid: str) -> list[int]:
        """Numbers of the rows of a group, in the order of its samples."""
        if self._uids is None:
            self._uids = self.columns(("uid",))["uid"]
        return np.flatnonzero(pc.fill_null(pc.equal(self._uids, uid), False).to_numpy(zero_copy_only=False)).tolist()

    def take(self, rows: list[int], names: Iterable[str]) -> list[dict[str, Any]]:
        """Single rows as dicts; only the row groups that hold them are read."""
        ends = np.cumsum([self._file.metadata.row_group(i).num_rows for i in range(self._file.metadata.num_row_groups)])
        group_of = np.searchsorted(ends, rows, side="right")
        groups = sorted(set(group_of.tolist()))
        sizes = {group: int(ends[group] - (ends[group - 1] if group else 0)) for group in groups}
        starts, total = {}, 0
        for group in groups:
            starts[group], total = total, total + sizes[group]
        places = [
            starts[group] + row - int(ends[group] - sizes[group])
            for row, group in zip(rows, group_of.tolist(), strict=True)
        ]
        return self.columns(names, groups).take(pa.array(places, pa.int64())).to_pylist() if rows else []


def _lengths(mask: Any) -> Any:
    return pa.array(_row_sums(mask, mask.values.to_numpy(zero_copy_only=False)), pa.int64())


def _advantages(advantages: Any, mask: Any) -> Any:
    written = mask.values.to_numpy(zero_copy_only=False)
    sums = _row_sums(advantages, advantages.values.to_numpy(zero_copy_only=False) * written)
    return pa.array(sums / np.maximum(_row_sums(mask, written), 1), pa.float32())


def _mismatches(ours: Any, rollout: Any, mask: Any) -> Any:
    gaps = abs(ours.values.to_numpy(zero_copy_only=False) - rollout.values.to_numpy(zero_copy_only=False))
    gaps = np.where(mask.values.to_numpy(zero_copy_only=False) > 0, gaps, 0)
    offsets = ours.offsets.to_numpy()
    return pa.array([gaps[a:b].max(initial=0.0) for a, b in pairwise(offsets)], pa.float32())


def _row_sums(lists: Any, values: np.ndarray) -> np.ndarray:
    # Lists lie end to end in one array: differences of one cumulative sum, not a loop over responses.
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    offsets = lists.offsets.to_numpy()
    return sums[offsets[1:]] - sums[offsets[:-1]]


_MADE: dict[str, tuple[tuple[str, ...], Any]] = {
    "length": (("response_mask",), _lengths),
    "advantage": (("advantages", "response_mask"), _advantages),
    "mismatch": (("old_log_probs", "rollout_log_probs", "response_mask"), _mismatches),
}
