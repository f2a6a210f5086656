"""Sequence parallelism (Ulysses): ranks that compute the same rows take a stretch of the tokens each.

Everything but attention works on single tokens and needs only the rank's stretch. For attention the ranks exchange:
each gets all tokens of its share of the heads, attends, and gives the stretches back. So the number of heads must be a
multiple of the number of ranks; fewer heads of keys and values are sent several times.

    tokens/ranks x heads  ->  all tokens x heads/ranks  ->  attention  ->  tokens/ranks x heads

Shapes: T tokens of all ranks (a multiple of their number), S of one rank's stretch, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from posttrain.kernels.packed_attention import PackedLayout, packed_attention
from posttrain.kernels.scores import NO_CHANGES, ScoreChanges

_active: dist.ProcessGroup | None = None


def sequence_group() -> dist.ProcessGroup | None:
    """The ranks that share the rows being computed now; None if each has its own."""
    return _active


@contextmanager
def shared_sequence(group: dist.ProcessGroup | None) -> Iterator[None]:
    """While open, attention is over the stretches of all ranks of `group`."""
    # A module variable, not a context variable: recomputation in the backward pass may run in autograd's own thread.
    global _active
    before, _active = _active, group
    try:
        yield
    finally:
        _active = before


class _Exchange(torch.autograd.Function):
    # Part i of every rank goes to rank i; parts are equal slices of the first dimension. It is its own inverse, so the
    # backward pass is the same exchange.
    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Exchange.apply(grad.contiguous(), ctx.group), None


def to_heads(stretch_SHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(T, H / ranks, D): all tokens of this rank's heads."""
    ranks = group.size()
    if stretch_SHD.shape[1] < ranks:  # several ranks have queries that read the same keys
        stretch_SHD = stretch_SHD.repeat_interleave(ranks // stretch_SHD.shape[1], dim=1)
    parts = torch.stack(stretch_SHD.chunk(ranks, dim=1))
    return _Exchange.apply(parts, group).flatten(0, 1)  # pyright: ignore


def to_stretches(heads_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(S, H, D): all heads of this rank's stretch."""
    ranks = group.size()
    parts = torch.stack(heads_THD.chunk(ranks, dim=0))
    return torch.cat(_Exchange.apply(parts, group).unbind(0), dim=1)  # pyright: ignore


def stretch_attention(
    query_SHD: torch.Tensor,
    key_SHD: torch.Tensor,
    value_SHD: torch.Tensor,
    layout: PackedLayout,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    changes: ScoreChanges = NO_CHANGES,
) -> torch.Tensor:
    """Attention (S, H, D) over the packed tokens of all ranks, or of this one where it has all of them. Tokens behind
    the layout's last make the stretches equally long; nothing attends to them."""
    group = _active
    ranks = 1 if group is None else group.size()
    fill = len(query_SHD) * ranks - layout.total
    query, key, value = query_SHD, key_SHD, value_SHD
    if group is not None:
        query, key, value = (to_heads(x, group) for x in (query, key, value))
        changes = changes.of_heads(group.rank(), ranks)
    if fill:
        query, key, value = (x[: layout.total].contiguous() for x in (query, key, value))
    how = {"scale": scale, "sliding_window": sliding_window, "changes": changes}
    out_THD = packed_attention(query, key, value, layout, **how)
    if fill:
        out_THD = torch.nn.functional.pad(out_THD, (0, 0, 0, 0, 0, fill))
    return out_THD if group is None else to_stretches(out_THD, group)


class _Gather(torch.autograd.Function):
    # The stretches of all ranks end to end. All ranks compute the same from here on, so the gradient of a stretch is
    # its own part, not a sum over ranks.
    @staticmethod
    def forward(ctx, stretch, group):
        ctx.group, ctx.size = group, len(stretch)
        out = stretch.new_empty(len(stretch) * group.size(), *stretch.shape[1:])
        dist.all_gather_into_tensor(out, stretch.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        start = ctx.group.rank() * ctx.size
        return grad[start : start + ctx.size].contiguous(), None


def gathered(stretch: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Values of all ranks, in their order."""
    return _Gather.apply(stretch, group)  # pyright: ignore


def own_stretch(tokens_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's share of tokens whose number is a multiple of the ranks'."""
    return tokens_T.chunk(group.size())[group.rank()]
