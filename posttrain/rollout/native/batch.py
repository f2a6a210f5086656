"""The flat batch of one step, from arrays on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from posttrain.kernels.decode import StepTokens


def with_rows(table: np.ndarray, more: Sequence[Sequence[int]]) -> np.ndarray:
    """The block table with further rows, each a list of blocks."""
    if not more:
        return table
    whole = np.zeros((len(table) + len(more), max(table.shape[1], *map(len, more))), np.int32)
    whole[: len(table), : table.shape[1]] = table
    for number, blocks in enumerate(more, start=len(table)):
        whole[number, : len(blocks)] = blocks
    return whole


def step_tokens(ids: list, positions: list, rows: list, table: np.ndarray, device: torch.device) -> StepTokens:
    """Tokens, positions and rows of the parts, end to end."""
    longest = max(int(part.max()) + 1 for part in positions if len(part))
    ids_T, positions_T, rows_T = (
        torch.from_numpy(np.concatenate(parts)).to(device) for parts in (ids, positions, rows)
    )
    return StepTokens(ids_T, positions_T, rows_T, torch.from_numpy(np.ascontiguousarray(table)).to(device), longest)
