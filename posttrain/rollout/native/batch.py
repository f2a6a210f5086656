"""The flat batch of one step, from arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.kernels.cuda import to_device
from posttrain.kernels.decode import BLOCK, FAR, StepTokens

Table = tuple[np.ndarray, np.ndarray]
"""(blocks, the position at which each starts), a row each."""


def starts(blocks: Sequence[int], first: int) -> range:
    """Where each block of a segment starts, if the segment starts at `first`."""
    return range(first, first + BLOCK * len(blocks), BLOCK)


def with_rows(rows: Table, more: Sequence[Sequence[int]]) -> Table:
    """The table with further rows, each a list of blocks that starts at position 0."""
    if not more:
        return rows
    old, width = rows[0].shape
    width = max(width, *map(len, more))
    table, begin = np.zeros((old + len(more), width), np.int32), np.full((old + len(more), width), FAR, np.int32)
    table[:old, : rows[0].shape[1]], begin[:old, : rows[0].shape[1]] = rows
    for number, blocks in enumerate(more, start=old):
        table[number, : len(blocks)], begin[number, : len(blocks)] = blocks, starts(blocks, 0)
    return table, begin


def step_tokens(ids: list, positions: list, rows: list, table: Table, device: torch.device) -> StepTokens:
    """Tokens, positions and rows of the parts, end to end."""
    longest = max(int(part.max()) + 1 for part in positions if len(part))
    flat = [np.concatenate(parts) for parts in (ids, positions, rows)]
    ids_T, positions_T, rows_T, table_RN, starts_RN = (
        to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in (*flat, *table)
    )
    return StepTokens(ids_T, positions_T, rows_T, table_RN, starts_RN, longest, flat[2])
