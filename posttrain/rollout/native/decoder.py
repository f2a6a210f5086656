"""A model as the native engine calls it: its interface, the flat batch of one step, and log-probs of given rows.

Shapes: T tokens of a pass, E width of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from posttrain.kernels.cuda import to_device
from posttrain.kernels.decode import FAR, LayerCache, StepTokens
from posttrain.kernels.states import RowStates
from posttrain.kernels.whole_step import DecodeRows
from posttrain.rollout.native.pool import Pool, block_starts, blocks_for
from posttrain.rollout.sampling import log_probs_of

Caches = Callable[[int, int, int], LayerCache]
"""The cache of a layer, by its number, its heads of keys and its head size."""


class Decoder(Protocol):
    """Hidden states and logits of flat tokens, and rows that decode on their own."""

    def hidden(
        self,
        step: StepTokens,
        caches: Caches,
        wanted_N: torch.Tensor | None = None,
        routes_PLK: torch.Tensor | None = None,
    ) -> torch.Tensor: ...
    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor: ...
    def decode(self, rows: DecodeRows, caches: Caches, routes_PLK: torch.Tensor | None = None) -> bool: ...
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None: ...
    def make_fast_copies(self) -> None: ...
    def drop_fast_copies(self) -> None: ...
    def without_fast_copies(self) -> AbstractContextManager[None]: ...
    def let_go(self) -> None: ...


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


def step_tokens(
    ids: list, positions: list, rows: list, table: Table, device: torch.device, states: RowStates | None = None
) -> StepTokens:
    """Tokens, positions and rows of the parts, end to end."""
    longest = max(int(part.max()) + 1 for part in positions if len(part))
    flat = [np.concatenate(parts) for parts in (ids, positions, rows)]
    ids_T, positions_T, rows_T, table_RN, starts_RN = (
        to_device(torch.from_numpy(np.ascontiguousarray(array)), device) for array in (*flat, *table)
    )
    return StepTokens(ids_T, positions_T, rows_T, table_RN, starts_RN, longest, flat[2], states)


Rows = Sequence[Sequence[int]]


def score_rows(decoder: Decoder, pool: Pool, rows: Rows, temperature: float, budget: int) -> list[torch.Tensor]:
    """Log-probs of each row's tokens after its first; a pass has up to `budget` tokens."""
    scores: list[torch.Tensor] = []
    none = np.zeros((0, 1), np.int32)
    for batch in _batches(rows, pool, budget):
        blocks = [pool.take(blocks_for(len(row))) for row in batch]
        numbers = [np.full(len(row), number, np.int32) for number, row in enumerate(batch)]
        positions = [np.arange(len(row), dtype=np.int32) for row in batch]
        ids = [np.asarray(row, np.int64) for row in batch]
        slots = [pool.states.take() for _ in batch]
        table, states = with_rows((none, none), [(held, 0) for held in blocks]), pool.states.of_rows(slots)
        step = step_tokens(ids, positions, numbers, table, pool.device, states)
        hidden_TE = decoder.hidden(step, pool.layer)
        log_probs_T = log_probs_of(decoder.logits, hidden_TE[:-1], step.ids_T[1:], temperature).cpu()
        ends = np.cumsum([len(row) for row in batch])
        scores += [log_probs_T[end - len(row) : end - 1] for row, end in zip(batch, ends.tolist(), strict=True)]
        for held, slot in zip(blocks, slots, strict=True):
            pool.give_back(held)
            pool.states.give_back(slot)
    return scores


def _batches(rows: Rows, pool: Pool, budget: int) -> Iterator[list[Sequence[int]]]:
    batch, tokens, blocks = [], 0, 0
    for row in rows:
        pool.check(len(row), 0)
        more = blocks_for(len(row))
        if batch and (tokens + len(row) > budget or not pool.fits(blocks + more, len(batch) + 1)):
            yield batch
            batch, tokens, blocks = [], 0, 0
        batch, tokens, blocks = [*batch, row], tokens + len(row), blocks + more
    if batch:
        yield batch
