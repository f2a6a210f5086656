"""First tokens of rows, sampled on the device right after their prompts were computed and not read by the host yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


def places_of(wanted: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Where each of `wanted` is in `held`; -1 for those that are not there."""
    if not len(held):
        return np.full(len(wanted), -1)
    order = np.argsort(held)
    place = order[np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)]
    return np.where(held[place] == wanted, place, -1)


@dataclass
class FirstTokens:
    """(B,) each, by the rows' numbers."""

    numbers: np.ndarray
    tokens: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def joined(cls, parts: Sequence[FirstTokens]) -> FirstTokens:
        numbers = np.concatenate([part.numbers for part in parts])
        columns = ([part.tokens for part in parts], [part.log_probs for part in parts])
        return cls(numbers, *(torch.cat(column) for column in columns))

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Where these rows' tokens are; -1 for rows that began earlier."""
        return places_of(numbers, self.numbers)
