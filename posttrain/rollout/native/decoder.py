"""What the native engine needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from posttrain.kernels.decode import LayerCache, StepTokens
from posttrain.kernels.whole_step import DecodeRows

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
