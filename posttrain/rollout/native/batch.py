"""The flat batch of one step, from arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.kernels.cuda import to_device
from posttrain.kernels.decode import FAR, StepTokens
from posttrain.rollout.native.pool import block_starts

Table = tuple[np.ndarray, np.ndarray]
"""(blocks, the position at which each starts), a row each."""


def with_rows(rows: Table, more: Sequence[tuple[Sequence[int], int]]) -> Table:
    """The table with further rows, each a list of blocks and its gap."""
    if not more:
        return rows
    old, width = rows[0].shape
    width = max(width, *(len(blocks) for blocks, _ in more))
    table, begin = np.zeros((old + len(more), width), np.int32), np.full((old + len(more), width), FAR, np.int32)
    table[:old, : rows[0].shape[1]], begin[:old, : rows[0].shape[1]] = rows
    for number, (blocks, gap) in enumerate(more, start=old):
        table[number, : len(blocks)], begin[number, : len(blocks)] = blocks, block_starts(len(blocks), gap)
    return table, begin


def step_tokens(ids: list, positions: list, rows: list, table: Table, device: torch.device) -> StepTokens:
    """Tokens, positions and rows of the parts, end to end."""
    longest = max(int(part.max()) + 1 for part in positions if len(part))
    flat = [np.concatenate(parts) for parts in (ids, positions, rows)]
    ids_T, positions_T, rows_T, table_RN, starts_RN = (
        to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in (*flat, *table)
    )
    return StepTokens(ids_T, positions_T, rows_T, table_RN, starts_RN, longest, flat[2])
