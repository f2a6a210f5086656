"""Causal attention over rows packed end to end without padding.

Every row attends to itself only; rows may share their beginning, which is then computed once. In float32 on a CPU a
compiled kernel takes the packed tokens as they are, and so does flash attention in half precision on a CUDA device.
Elsewhere rows are gathered into a few rectangles of similar length, and each rectangle is one call of torch's own
attention. Rows are padded on the right there: under a causal mask no real token sees padding on the right, so no mask
is built for rows that share nothing.

Shapes: T packed tokens, H heads, D head size; a rectangle has R rows of length L; S slots are the places of all
rectangles, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.kernels.cuda import to_device
from posttrain.kernels.scores import NO_CHANGES, ScoreChanges, changed_attention
from posttrain.kernels.segments import SegmentPlan
from posttrain.kernels.train import PackedAttention, Sight, can_attend

SHORTEST_SHARE = 0.75  # a row shorter than this share of a rectangle's length opens the next rectangle


class PackedLayout:
    """The place of each sequence among the packed tokens, and the rectangles in which attention is computed.

    A sequence is one row, or a tree of rows that share their beginnings, such as a prompt followed by several responses
    to it: `end_T` is the place behind the last token that sees this one (`train.Sight`). `position_T` are the tokens'
    positions, which a sliding window goes by. `wanted_T` are the tokens whose hidden states are asked for, in
    order; a last layer may leave the others out. `answered` counts the layers whose attention this layout has served.
    With `exact`, a pass gives log-probs the bits that decoding gives them; with `fp8` (`models/layer_weights.py`), its
    products read 8-bit copies of the weights. `turned_by` are cosines and sines (T, D), where attention itself rotates
    queries and keys.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        *,
        end_T: torch.Tensor | None = None,
        position_T: torch.Tensor | None = None,
        wanted_T: torch.Tensor | None = None,
    ) -> None:
        self.answered, self.exact = 0, False
        self.fp8: Any = None
        self.turned_by: tuple[torch.Tensor, torch.Tensor] | None = None
        self.segments: dict[bool, SegmentPlan] = {}  # made by the first layer with a recurrent state
        self._rotation: tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]] | None = None
        self.lengths, self.device = torch.tensor(lengths), torch.device(device)
        self.total = int(self.lengths.sum())
        self.end_T, self.position_T = end_T, position_T
        self.wanted_T = None if wanted_T is None else to_device(wanted_T, self.device)

    def rotation(self, tables: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of the packed tokens, from a batch of one row; the same for all layers of a pass."""
        if self._rotation is None or self._rotation[0] is not tables:
            self._rotation = tables, tuple(table[0].contiguous() for table in tables)
        return self._rotation[1]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, length) of each rectangle."""
        return [(len(rows), int(self.lengths[rows[0]])) for rows in self._similar()]

    @cached_property
    def _slots(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        starts = self.lengths.cumsum(0) - self.lengths
        tokens, real = [], []
        for rows in self._similar():
            places_L = torch.arange(int(self.lengths[rows[0]]))
            tokens.append((starts[rows, None] + places_L).clamp(max=self.total - 1).flatten())
            real.append((places_L < self.lengths[rows, None]).flatten())
        token_S, real_S = torch.cat(tokens), torch.cat(real)
        slot_T = torch.empty(self.total, dtype=torch.long)
        slot_T[token_S[real_S]] = real_S.nonzero().squeeze(1)
        all_real = None if bool(real_S.all()) else real_S.to(self.device)
        return token_S.to(self.device), all_real, slot_T.to(self.device)

    @property
    def token_S(self) -> torch.Tensor:
        """The token in each slot; padding repeats one."""
        return self._slots[0]

    @property
    def real_S(self) -> torch.Tensor | None:
        """Which slots hold a token; None if all do."""
        return self._slots[1]

    @property
    def slot_T(self) -> torch.Tensor:
        return self._slots[2]

    @cached_property
    def end_S(self) -> torch.Tensor | None:
        """The ends, counted from the start of each sequence; the longest
        length where all of the sequence behind the token sees it."""
        if self.end_T is None:
            return None
        starts_T = torch.repeat_interleave(self.lengths.cumsum(0) - self.lengths, self.lengths)
        ends_T, lengths_T = self.end_T.cpu() - starts_T, torch.repeat_interleave(self.lengths, self.lengths)
        return ends_T.where(ends_T < lengths_T, int(self.lengths.max())).to(self.device)[self.token_S]

    @cached_property
    def position_S(self) -> torch.Tensor | None:
        return None if self.position_T is None else self.position_T.to(self.device)[self.token_S]

    def _similar(self) -> Iterator[torch.Tensor]:
        # From long to short; a new rectangle starts where padding would exceed a quarter of a row.
        by_length = torch.argsort(self.lengths, descending=True, stable=True)
        start = 0
        while start < len(by_length):
            lengths = self.lengths[by_length[start:]]
            count = int((lengths >= SHORTEST_SHARE * lengths[0]).sum())
            yield by_length[start : start + count]
            start += count

    @cached_property
    def sight(self) -> Sight:
        """Which tokens attend to which, as the compiled kernels read it."""
        found = Sight.of(self.lengths.tolist(), None if self.end_T is None else self.end_T.cpu().numpy())
        found.exact = self.exact
        return found

    @cached_property
    def masks(self) -> dict[int | None, list[torch.Tensor | None]]:
        """Masks of the rectangles by sliding window, filled by `mask`; the same few for every layer."""
        return {}

    def mask(self, box: int, start: int, window: int | None) -> torch.Tensor | None:
        """The attention mask of a rectangle, (R, 1, L, L), or None if it is plainly causal."""
        kept = self.masks.setdefault(window, [])
        if len(kept) <= box:
            kept.append(self._mask(*self.shapes[box], start, window))
        return kept[box]

    def _mask(self, rows: int, length: int, start: int, window: int | None) -> torch.Tensor | None:
        slots = slice(start, start + rows * length)
        places_L = torch.arange(length, device=self.token_S.device)
        end_RL = None if self.end_S is None else self.end_S[slots].view(rows, length)
        shared = end_RL is not None and bool((end_RL < int(self.lengths.max())).any())
        narrow = window is not None and window < length
        if not (shared or narrow):
            return None
        seen = (places_L[:, None] >= places_L).expand(rows, length, length)
        if shared and end_RL is not None:
            # Padding repeats a token of any row. It sees itself at least: a softmax over nothing would be NaN.
            end_RL = torch.maximum(end_RL, places_L + 1)
            seen = seen & (places_L[:, None] < end_RL[:, None, :])
        if narrow and window is not None:
            position_RL = places_L.expand(rows, length)
            if self.position_S is not None:
                position_RL = self.position_S[slots].view(rows, length)
            seen = seen & (position_RL[:, :, None] - position_RL[:, None, :] < window)
        return seen[:, None]


class _ToSlots(torch.autograd.Function):
    # Padding slots repeat a token but get no gradient, as no real token sees them. So the backward pass is a gather
    # and not the accumulating scatter that autograd would use, which was slower.
    @staticmethod
    def forward(ctx, tokens_THD, layout):
        ctx.layout = layout
        return tokens_THD.index_select(0, layout.token_S)

    @staticmethod
    def backward(ctx, grad_SHD):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_SHD.index_select(0, ctx.layout.slot_T), None


class _FromSlots(torch.autograd.Function):
    # Padding is dropped, and its gradient is 0.
    @staticmethod
    def forward(ctx, slots_SHD, layout):
        ctx.layout = layout
        return slots_SHD.index_select(0, layout.slot_T)

    @staticmethod
    def backward(ctx, grad_THD):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_SHD = grad_THD.index_select(0, ctx.layout.token_S)
        if ctx.layout.real_S is not None:
            grad_SHD.masked_fill_(~ctx.layout.real_S[:, None, None], 0.0)
        return grad_SHD, None


def packed_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    changes: ScoreChanges = NO_CHANGES,
) -> torch.Tensor:
    """Attention output (T, H, D). Keys and values may have fewer heads than queries (grouped-query attention)."""
    narrow = sliding_window is not None and sliding_window < int(layout.lengths.max())
    factor = query_THD.shape[-1] ** -0.5 if scale is None else scale
    if can_attend(query_THD.shape[-1], query_THD) and not narrow and not changes:
        return PackedAttention.apply(query_THD, key_THD, value_THD, layout.sight, factor)  # pyright: ignore
    slots = [_ToSlots.apply(x, layout) for x in (query_THD, key_THD, value_THD)]
    pieces, start = [], 0
    for box, (rows, length) in enumerate(layout.shapes):
        end = start + rows * length
        query, key, value = (x[start:end].unflatten(0, (rows, length)).transpose(1, 2) for x in slots)  # pyright: ignore
        mask = layout.mask(box, start, sliding_window)
        if changes:
            out_RHLD = changed_attention(query, key, value, mask, scale=factor, changes=changes)
        else:
            out_RHLD = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        pieces.append(out_RHLD.transpose(1, 2).flatten(0, 1))
        start = end
    return _FromSlots.apply(torch.cat(pieces) if len(pieces) > 1 else pieces[0], layout)  # pyright: ignore


_active_layout: PackedLayout | None = None


def active_layout() -> PackedLayout | None:
    """The layout of the packed rows that are being computed now, if any."""
    return _active_layout


@contextmanager
def packed_rows(layout: PackedLayout | None) -> Iterator[None]:
    """While open, models loaded by `posttrain.models` read their input as packed rows of this layout."""
    # A module variable, not a context variable: recomputation in the backward pass may run in autograd's own thread.
    global _active_layout
    before, _active_layout = _active_layout, layout
    try:
        yield
    finally:
        _active_layout = before
