"""The paged step that is being computed now: it answers the attention of transformers' modules from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from posttrain.kernels.scores import ScoreChanges


class PagedStep(Protocol):
    """Attention of a step's tokens, whose keys and values enter the cache; `kernels/decode.py` describes both ways."""

    def attend(
        self,
        layer: Any,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        changes: ScoreChanges,
    ) -> torch.Tensor:
        """(T, H, D)."""
        ...

    def attend_latent(
        self, layer: Any, query_THC: torch.Tensor, latent_TC: torch.Tensor, *, rank: int, scale: float
    ) -> torch.Tensor:
        """(T, H, R): weighted latents."""
        ...

    def recur(self, layer: Any, hidden_1TE: torch.Tensor) -> Any:
        """What a layer with recurrent states gives for the tokens; the states of their sequences move on."""
        ...


_active: PagedStep | None = None


def active_step() -> PagedStep | None:
    """Return what computes attention during a paged step, or None."""
    return _active


@contextmanager
def paged_step(step: PagedStep) -> Iterator[None]:
    """While open, attention is computed by `step`."""
    global _active
    before, _active = _active, step
    try:
        yield
    finally:
        _active = before
