"""Causal attention over rows packed end to end without padding.

Every row attends to itself only. Rows are gathered into a few rectangles of similar length, and each rectangle is
one call of torch's own attention: rows are padded on the right there, and under a causal mask padding on the right
is never seen by a real token, so no mask is built. Linear layers around it work on the packed tokens alone.

Shapes: T packed tokens, H heads, D head size, R rows of a rectangle, L its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SHORTEST_SHARE = 0.75  # a row shorter than this share of a rectangle's length opens the next rectangle


@dataclass
class Rectangle:
    """Rows of similar length: where their tokens lie in the packed order, and which places are padding."""

    token_RL: torch.Tensor
    real_RL: torch.Tensor
    full: bool


class PackedLayout:
    """Where each row lies among the packed tokens, and the rectangles in which attention is computed."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = [int(length) for length in lengths]
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        self.starts = starts[:-1]
        self.total = starts[-1]
        self.rectangles = [self._rectangle(rows, device) for rows in self._similar_rows()]
        order = torch.cat([box.token_RL[box.real_RL] for box in self.rectangles])
        self.back_T = torch.argsort(order)

    def _similar_rows(self) -> Iterator[list[int]]:
        """Rows from long to short, cut where the padding would grow too large."""
        by_length = sorted(range(len(self.lengths)), key=lambda row: (-self.lengths[row], row))
        group: list[int] = []
        for row in by_length:
            if group and self.lengths[row] < SHORTEST_SHARE * self.lengths[group[0]]:
                yield group
                group = []
            group.append(row)
        yield group

    def _rectangle(self, rows: list[int], device: torch.device | str) -> Rectangle:
        starts_R = torch.tensor([self.starts[row] for row in rows], device=device)
        lengths_R = torch.tensor([self.lengths[row] for row in rows], device=device)
        places_L = torch.arange(int(lengths_R.max()), device=device)
        real_RL = places_L < lengths_R[:, None]
        token_RL = (starts_R[:, None] + places_L).clamp(max=self.total - 1)
        return Rectangle(token_RL, real_RL, bool(real_RL.all()))


def packed_attention(
    query_HTD: torch.Tensor,
    key_HTD: torch.Tensor,
    value_HTD: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attention output (T, H, D). Keys and values may have fewer heads than queries (grouped-query attention)."""
    pieces = []
    for box in layout.rectangles:
        query, key, value = (x[:, box.token_RL].transpose(0, 1) for x in (query_HTD, key_HTD, value_HTD))
        window_LL = _window_mask(box.token_RL.shape[1], sliding_window, query.device)
        out_RHLD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=window_LL,
            is_causal=window_LL is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out_RLHD = out_RHLD.transpose(1, 2)
        pieces.append(out_RLHD.flatten(0, 1) if box.full else out_RLHD[box.real_RL])
    return torch.cat(pieces)[layout.back_T]


def _window_mask(length: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    if sliding_window is None or sliding_window >= length:
        return None
    places_L = torch.arange(length, device=device)
    distance_LL = places_L[:, None] - places_L[None, :]
    return (distance_LL >= 0) & (distance_LL < sliding_window)


def plain_attention(
    query_HTD: torch.Tensor, key_HTD: torch.Tensor, value_HTD: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """The twin: one row at a time, written out."""
    repeats = query_HTD.shape[0] // key_HTD.shape[0]
    outputs, start = [], 0
    for length in lengths:
        row = slice(start, start + length)
        key, value = (x[:, row].repeat_interleave(repeats, 0) for x in (key_HTD, value_HTD))
        scores = query_HTD[:, row] @ key.transpose(1, 2) * scale
        future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        outputs.append((scores.masked_fill(future, float("-inf")).softmax(-1) @ value).transpose(0, 1))
        start += length
    return torch.cat(outputs)


_active_layout: PackedLayout | None = None


def active_layout() -> PackedLayout | None:
    """The layout of the packed rows that are being computed right now, if any."""
    return _active_layout


@contextmanager
def packed_rows(layout: PackedLayout | None) -> Iterator[None]:
    """While open, models loaded by `posttrain.models` read their input as packed rows of this layout.

    A module-wide variable on purpose: recomputation in the backward pass may run in a thread of autograd's own.
    """
    global _active_layout
    before, _active_layout = _active_layout, layout
    try:
        yield
    finally:
        _active_layout = before
