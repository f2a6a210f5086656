"""Log-probs of given rows, as the native engine computes them: flat passes over a cache that is free again afterwards.

Shapes: T tokens of a pass, E width of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from posttrain.rollout.native.batch import step_tokens, with_rows
from posttrain.rollout.native.decoder import Decoder
from posttrain.rollout.native.pool import Pool, blocks_for
from posttrain.rollout.sampling import log_probs_of

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
        step = step_tokens(
            ids, positions, numbers, with_rows((none, none), [(held, 0) for held in blocks]), pool.device
        )
        hidden_TE = decoder.hidden(step, pool.layer)
        log_probs_T = log_probs_of(decoder.logits, hidden_TE[:-1], step.ids_T[1:], temperature).cpu()
        ends = np.cumsum([len(row) for row in batch])
        scores += [log_probs_T[end - len(row) : end - 1] for row, end in zip(batch, ends.tolist(), strict=True)]
        for held in blocks:
            pool.give_back(held)
    return scores


def _batches(rows: Rows, pool: Pool, budget: int) -> Iterator[list[Sequence[int]]]:
    batch, tokens, blocks = [], 0, 0
    for row in rows:
        pool.check(len(row), 0)
        more = blocks_for(len(row))
        if batch and (tokens + len(row) > budget or not pool.fits(blocks + more)):
            yield batch
            batch, tokens, blocks = [], 0, 0
        batch, tokens, blocks = [*batch, row], tokens + len(row), blocks + more
    if batch:
        yield batch
