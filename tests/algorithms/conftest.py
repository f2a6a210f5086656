"""Ragged batches in float64 for the tests of this folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

LENGTHS = (5, 1, 7, 3, 0, 6, 2, 7, 4, 1, 3, 5, 0, 2, 6, 7)


@pytest.fixture
def ragged() -> SimpleNamespace:
    """16 rows of width 7: lengths of 0 to 7, observation tokens inside some rows, any log-probs."""
    generator = torch.Generator().manual_seed(7)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(len(LENGTHS), 7, generator=generator, dtype=torch.float64) * scale

    mask = torch.zeros(len(LENGTHS), 7, dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    mask[2, 2:4] = 0
    mask[7, 5] = 0
    mask[15, 0] = 0
    return SimpleNamespace(
        mask=mask,
        log_prob=-1.5 + normal(0.4),
        old_log_prob=-1.5 + normal(0.4),
        ref_log_prob=-1.5 + normal(0.4),
        rollout_log_prob=-1.5 + normal(0.4),
        advantages=normal(),
        values=normal(),
        returns=normal(),
        rewards=normal() * mask,
        losses=normal(),
    )
